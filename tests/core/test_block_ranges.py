"""Sessions of a range of blocks, with both cores: rows in, rows out, whatever is lost or moved."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from support.core.gateway import ROW_BYTES, Gateway, add_gateway, swarm_of
from support.core.server import MODEL, reference_rows

from modelswarm.protocol.messages import BlockRange, Finish, ReturnedRows, Sampling
from modelswarm.protocol.opaque import opaque_entries
from modelswarm_gateway.core.interface.effects import Emitted, MigrationEnded, Refused, Rerouted
from modelswarm_gateway.core.interface.errors import PromptTooLong
from modelswarm_gateway.core.interface.turn import RefusalReason, Reservation, TurnRequest
from modelswarm_serving.model.hash_model import mix

SPANS = ((0, 2), (2, 3), (3, 4))
RANGES = [(first, last) for first in range(4) for last in range(first + 1, 5)]
LENGTH = 41  # positions of a session: ten pages and one position


def input_rows(count: int, seed: int = 0) -> list[int]:
    return [mix(seed * 1000 + at) for at in range(count)]


def begin(
    gateway: Gateway, rows: Sequence[int], start: int, blocks: tuple[int, int], ahead: int = 1000
) -> None:
    """Start a turn that returns the rows from `start` on; the first one opens the session."""
    core, now = gateway.core, gateway.network.now
    if core.find_view("a") is None:
        core.open_session("a", MODEL, now, 0)
    packed = [struct.pack("<Q", row) for row in rows]
    request = TurnRequest(
        opaque_entries(packed),
        0,
        Sampling(returned=ReturnedRows(start, hidden_states=True)),
        credit_ahead=ahead,
        reservation=Reservation(LENGTH, 60, BlockRange(*blocks)),
        row_bytes=ROW_BYTES,
        opaque=dict(enumerate(packed)),
    )
    gateway.effects.clear()
    core.start_turn("a", request, now)
    gateway.network.run()


def right(rows: Sequence[int], start: int, blocks: tuple[int, int]) -> list[tuple[int, int]]:
    found = reference_rows(rows, dict(enumerate(rows)), blocks[1], blocks[0])
    return list(enumerate(found))[start:]


@pytest.mark.parametrize("blocks", RANGES)
@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
def test_any_range_returns_the_rows_behind_it(
    spans: Sequence[tuple[int, int]], blocks: tuple[int, int]
) -> None:
    """Ranges may begin and end in the middle of a server's span."""
    swarm = swarm_of(*spans)
    rows = input_rows(9)
    begin(swarm.gateway, rows, 0, blocks)
    assert swarm.gateway.rows("a") == right(rows, 0, blocks)
    [end] = swarm.gateway.all(Emitted)
    assert (end.token, end.finish) == (-1, Finish.LENGTH)
    hops = swarm.gateway.view("a").route
    assert (hops[0].first, hops[-1].last) == blocks
    rows += input_rows(3, seed=1)
    begin(swarm.gateway, rows, 9, blocks)
    assert swarm.gateway.rows("a") == right(rows, 9, blocks), "the KV of earlier rows stays"
    changed = [*rows[:4], *input_rows(2, seed=2)]
    begin(swarm.gateway, changed, 4, blocks)
    assert swarm.gateway.rows("a") == right(changed, 4, blocks), "a step may go back"
    swarm.core.close_session("a", swarm.now)
    swarm.wait(1.0)
    assert all(server.core.stats.sessions == 0 for server in swarm.servers.values())


@pytest.mark.parametrize("blocks", [(0, 4), (1, 3)])
@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
def test_opened_range_has_no_rows_yet(
    spans: Sequence[tuple[int, int]], blocks: tuple[int, int]
) -> None:
    """The one entry of its log holds the place until the first rows."""
    swarm = swarm_of(*spans)
    packed = bytes(ROW_BYTES)
    holder = opaque_entries([packed])
    room = Reservation(LENGTH, 60, BlockRange(*blocks))
    request = TurnRequest(holder, 0, Sampling(), reservation=room, opaque={0: packed})
    swarm.core.open_session("a", MODEL, swarm.now, 0)
    swarm.core.start_turn("a", request, swarm.now)
    swarm.run()
    [end] = swarm.gateway.all(Emitted)
    assert (end.position, end.token, end.finish) == (1, -1, Finish.LENGTH)
    rows = input_rows(9)
    begin(swarm.gateway, rows, 0, blocks)
    assert swarm.gateway.rows("a") == right(rows, 0, blocks)


@pytest.mark.parametrize("blocks", [(0, 4), (1, 3)])
def test_opened_range_has_room_for_all_its_rows(blocks: tuple[int, int]) -> None:
    """They were reserved when it was opened, also the last one behind a page's end."""
    swarm = swarm_of(*SPANS)
    rows = input_rows(LENGTH)
    begin(swarm.gateway, rows[:5], 0, blocks)
    free = [server.core.stats.free_pages for server in swarm.route("a")]
    begin(swarm.gateway, rows, 5, blocks)
    assert swarm.gateway.rows("a") == right(rows, 5, blocks)
    assert [server.core.stats.free_pages for server in swarm.route("a")] == free
    with pytest.raises(PromptTooLong):
        begin(swarm.gateway, input_rows(LENGTH + 1), LENGTH, blocks)


def test_range_needs_no_server_of_other_blocks() -> None:
    swarm = swarm_of((0, 2), (3, 4))
    rows = input_rows(5)
    begin(swarm.gateway, rows, 0, (0, 2))
    assert swarm.gateway.rows("a") == right(rows, 0, (0, 2))
    swarm.core.close_session("a", swarm.now)
    begin(swarm.gateway, rows, 0, (1, 3))
    [refused] = swarm.gateway.all(Refused)
    assert refused.reason is RefusalReason.NO_SERVERS


def test_range_and_tokens_share_steps() -> None:
    """A server runs both at the same time."""
    swarm = swarm_of((0, 2), (2, 4))
    rows = input_rows(12)
    swarm.gateway.begin("tokens", [1, 2, 3], 20)
    begin(swarm.gateway, rows, 0, (0, 4))
    assert swarm.gateway.rows("a") == right(rows, 0, (0, 4))
    swarm.wait(5.0)
    assert not swarm.gateway.all(Rerouted)


@pytest.mark.parametrize("blocks", [(0, 4), (1, 4), (0, 3), (1, 3)])
@pytest.mark.parametrize("seed", range(8))
def test_kills_and_drains_leave_rows_as_they_are(seed: int, blocks: tuple[int, int]) -> None:
    rng = random.Random(seed)
    swarm = swarm_of(*SPANS, *SPANS)
    rows: list[int] = []
    for turn in range(4):
        start = len(rows)
        rows += input_rows(7, seed=turn)
        begin(swarm.gateway, rows, start, blocks, ahead=rng.choice((1, 3, 1000)))
        for position in range(start + 1, len(rows)):
            swarm.disturb(rng, kill=0.3)
            swarm.gateway.read("a", position)
            swarm.wait(0.1)
        swarm.gateway.read("a")
        swarm.wait(2.0)
        assert swarm.gateway.rows("a") == right(rows, start, blocks)


def test_head_of_a_range_migrates() -> None:
    swarm = swarm_of((0, 2), (2, 4), (0, 2), (2, 4))
    rows = input_rows(30)
    begin(swarm.gateway, rows, 0, (1, 3), ahead=5)
    old = swarm.gateway.route("a")[0]
    swarm.core.migrations.drain(old, "drain", swarm.now)
    for position in range(1, 31):
        swarm.gateway.read("a", position)
        swarm.wait(0.3)
    assert [each.outcome for each in swarm.gateway.all(MigrationEnded)] == ["migrated"]
    assert old not in swarm.gateway.route("a")
    assert swarm.gateway.rows("a") == right(rows, 0, (1, 3))


def test_another_gateway_takes_a_range_over() -> None:
    swarm = swarm_of((0, 2), (2, 4), (0, 2), (2, 4))
    rows = input_rows(8)
    begin(swarm.gateway, rows, 0, (1, 3))
    swarm.kill(swarm.gateway.peer)
    other = add_gateway(swarm, 2)
    swarm.wait(other.find("a").takeover_wait + 1)
    other.adopt(other.find("a"))
    swarm.kill(other.route("a")[0])
    rows += input_rows(4, seed=3)
    begin(other, rows, 8, (1, 3))
    assert other.rows("a") == right(rows, 8, (1, 3))
