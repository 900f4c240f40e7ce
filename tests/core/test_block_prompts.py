"""Rows that blocks add at the first positions of a log (R14, opaque rows), with both cores: parts of its entries."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.core.gateway import Gateway, Swarm, add_gateway, swarm_of
from support.core.server import MODEL, VOCABULARY, reference_rows

from modelswarm.protocol.identity import NO_HANDLE
from modelswarm.protocol.messages import FaultReport, Fence, FenceAck, Input, Lane, Sampling
from modelswarm.protocol.opaque import opaque_entries, split_entries
from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.interface.errors import CoreError
from modelswarm_gateway.core.interface.turn import RefusalReason, TurnRequest
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.model.hash_model import mix, sample_token

NEW = 20
BLOCKS = 4
COUNT = 6  # positions with rows of blocks
SPANS = ((0, 1), (1, 3), (3, 4))
OLD = {"version": (2, 3)}


def chains(count: int = COUNT, seed: int = 0) -> list[tuple[int, ...]]:
    """Return for each position the row in place of the embedding, and what each block adds."""
    return [tuple(mix(seed * 1000 + at * 10 + n) for n in range(1 + BLOCKS)) for at in range(count)]


def packed(rows: Sequence[tuple[int, ...]]) -> list[bytes]:
    return [struct.pack(f"<{len(row)}Q", *row) for row in rows]


ROWS = chains()
ENTRIES = opaque_entries(packed(ROWS))
LOG = (*ENTRIES, 5, 6, 7)


def begin(
    gateway: Gateway,
    log: Sequence[int] = LOG,
    rows: Sequence[tuple[int, ...]] = ROWS,
    session: str = "a",
    ahead: int = 1000,
    parent: str = "",
) -> None:
    """Start a turn; the first one opens the session."""
    core, network = gateway.core, gateway.network
    if core.find_view(session) is None:
        core.open_session(session, MODEL, network.now, 0)
    opaque = dict(enumerate(packed(rows)))
    request = TurnRequest(
        tuple(log), NEW, Sampling(), credit_ahead=ahead, opaque=opaque, parent=parent
    )
    core.start_turn(session, request, network.now)
    network.run()


def right(log: Sequence[int] = LOG, rows: Sequence[tuple[int, ...]] = ROWS) -> list[int]:
    """Return the tokens after the log."""
    made = list(log)
    opaque = {at: row[0] for at, row in enumerate(rows)}
    prompts = {at: row[1:] for at, row in enumerate(rows)}
    for _ in range(NEW):
        row = reference_rows(made, opaque, prompts=prompts)[-1]
        made.append(sample_token(row, Sampling(), len(made), made, len(log), VOCABULARY).token)
    return made[len(log) :]


def inputs_of(swarm: Swarm, first: int) -> list[Input]:
    """Return what the server that begins at block `first` got."""
    peers = {peer for peer, server in swarm.servers.items() if server.hello.first == first}
    return [
        send.item
        for send in swarm.sent(Input)
        if isinstance(send.item, Input) and send.to.peer in peers
    ]


def hops_of(swarm: Swarm) -> list[tuple[int, Hop]]:
    """Return the hops at all servers, with their first blocks."""
    hops = [hop for server in swarm.servers.values() for hop in server.core._fencing.hops]
    return [(hop.first, hop) for hop in hops]


@pytest.mark.parametrize("spans", [((0, 4),), ((0, 2), (2, 4)), SPANS])
def test_every_block_adds_its_rows(spans: Sequence[tuple[int, int]]) -> None:
    swarm = swarm_of(*spans)
    begin(swarm.gateway)
    assert swarm.gateway.tokens("a") == right()
    for block in range(1 + BLOCKS):
        rows = [*ROWS]
        rows[2] = tuple(mix(n) if n == block else row for n, row in enumerate(ROWS[2]))
        log = (*opaque_entries(packed(rows)), 5, 6, 7)
        swarm.gateway.effects.clear()
        begin(swarm.gateway, log, rows)
        assert swarm.gateway.tokens("a") == right(log, rows) != right()


def test_hop_between_head_and_tail_gets_its_own_rows() -> None:
    swarm = swarm_of(*SPANS)
    begin(swarm.gateway)
    [sent] = inputs_of(swarm, 1)
    assert (sent.start, sent.tokens) == (0, ENTRIES)
    assert sent.rows == b"".join(packed([row[2:4] for row in ROWS]))
    assert inputs_of(swarm, 0)[0].rows == b"".join(packed(ROWS))
    kept = [len(hop.opaque) for _, hop in sorted(hops_of(swarm))]
    assert kept == [COUNT, 0, COUNT], "those that have run are in the logs only"


def test_small_steps_and_pieces_give_the_same_tokens() -> None:
    """The rows come in several turns, and steps end between them."""
    swarm = swarm_of(*SPANS, token_budget=2)
    for count in (1, 4, COUNT):
        begin(swarm.gateway, ENTRIES[:count], ROWS[:count])
    swarm.gateway.effects.clear()
    begin(swarm.gateway)
    assert swarm.gateway.tokens("a") == right()


def test_turns_continue_and_rewind_into_the_rows() -> None:
    swarm = swarm_of(*SPANS)
    begin(swarm.gateway)
    log = (*LOG, *right(), 9)
    swarm.gateway.effects.clear()
    begin(swarm.gateway, log, ())
    assert swarm.gateway.tokens("a") == right(log)
    for kept in (3, 0):
        shorter = (*ENTRIES[:kept], 8, 9)
        swarm.gateway.effects.clear()
        begin(swarm.gateway, shorter, ())
        assert swarm.gateway.tokens("a") == right(shorter, ROWS[:kept])
    swarm.gateway.effects.clear()
    begin(swarm.gateway)
    assert swarm.gateway.tokens("a") == right()


@pytest.mark.parametrize("seed", range(20))
def test_kills_and_drains_do_not_change_tokens(seed: int) -> None:
    rng = random.Random(seed)
    swarm = swarm_of(*SPANS, *SPANS, token_budget=rng.choice((2, 512)))
    begin(swarm.gateway, ahead=rng.choice((1, 5)))
    for position in range(len(LOG), len(LOG) + NEW):
        swarm.disturb(rng)
        swarm.gateway.read("a", position)
        swarm.wait(0.1)
    swarm.gateway.read("a")
    swarm.wait(1.0)
    assert swarm.gateway.tokens("a") == right()


@pytest.mark.parametrize("lost", [first for first, _ in SPANS])
def test_another_gateway_takes_the_rows_over(lost: int) -> None:
    """They are in the copies of the log, so the client need not send them again."""
    swarm = swarm_of(*SPANS, *SPANS)
    begin(swarm.gateway, ahead=5)
    swarm.kill(swarm.gateway.peer)
    other = add_gateway(swarm, 2)
    where = other.find("a")
    swarm.wait(where.takeover_wait + 1)
    log = other.adopt(other.find("a"))
    assert tuple(log[: len(LOG)]) == LOG
    swarm.kill(next(peer for peer in other.route("a") if swarm.servers[peer].hello.first == lost))
    begin(other, LOG, ())
    other.read("a")
    assert other.tokens("a") == right()


def test_fork_has_the_rows_of_its_parent() -> None:
    swarm = swarm_of(*SPANS)
    begin(swarm.gateway)
    begin(swarm.gateway, (*LOG, 1), (), session="b", parent="a")
    assert swarm.gateway.tokens("b") == right((*LOG, 1))
    swarm.core.close_session("a", swarm.now)
    for first, last in SPANS:
        [victim] = [each for each in swarm.servers.values() if each.hello.first == first]
        swarm.kill(victim.peer)
        swarm.serve(first, last)
        swarm.gateway.effects.clear()
        begin(swarm.gateway, (*LOG, 2), (), session="b")
        assert swarm.gateway.tokens("b") == right((*LOG, 2))


def test_rows_of_blocks_elsewhere_are_refused() -> None:
    swarm = swarm_of((0, 4))
    wrong = [
        {1: packed(ROWS)[0]},  # not the first entry
        {0: packed(ROWS)[0], 1: packed(ROWS)[1][:8]},  # not the only kind
    ]
    swarm.core.open_session("a", MODEL, swarm.now, 0)
    for opaque in wrong:
        entry = dict(zip(opaque, opaque_entries(opaque.values()), strict=True))
        tokens = tuple(entry.get(at, 3) for at in range(4))
        with pytest.raises(CoreError, match="must be the first ones of a log"):
            swarm.core.start_turn("a", TurnRequest(tokens, 1, Sampling(), opaque=opaque), swarm.now)


def test_servers_of_an_older_version_are_left_out() -> None:
    swarm = Swarm()
    for first, last in SPANS:
        swarm.serve(first, last, OLD)
    begin(swarm.gateway)
    [refused] = swarm.gateway.all(Refused)
    assert refused.reason is RefusalReason.NO_SERVERS
    assert "that know rows of blocks (version 2.4) do not hold all blocks" in refused.detail
    new = {swarm.serve(first, last).peer for first, last in SPANS}
    swarm.gateway.effects.clear()
    begin(swarm.gateway)
    assert swarm.gateway.tokens("a") == right()
    assert set(swarm.gateway.route("a")) == new
    begin(swarm.gateway, (1, 2, 3), (), session="b")
    assert swarm.gateway.tokens("b") == right((1, 2, 3), ())


def test_older_gateway_gets_nothing_of_such_a_log() -> None:
    """It knows no `Turn.prompt_rows`: without them the log's KV would be that of other rows."""
    swarm = swarm_of((0, 4))
    begin(swarm.gateway)
    [server] = swarm.servers.values()
    view: Any = swarm.core._sessions["a"]
    [hop] = view.hops
    turn = replace(view.turn, prompt_rows=0)
    epoch = view.epoch._replace(counter=view.epoch.counter + 1)
    fence = Fence(hop.server_handle, hop.gateway_handle, epoch, 1 << 20, 1 << 20, turn=turn)
    server.core.receive(swarm.gateway.peer, fence, swarm.now)
    [ack] = [s.item for s in server.core.take_sends() if isinstance(s.item, FenceAck)]
    assert (ack.server_handle != NO_HANDLE, ack.kv, ack.log) == (True, 0, 0)


def test_hop_waits_for_its_rows() -> None:
    """Rows of its predecessor come on another connection, and may be earlier."""
    swarm = swarm_of(*SPANS)
    [middle] = [peer for peer, server in swarm.servers.items() if server.hello.first == 1]
    lane = (swarm.gateway.peer, middle, Lane.BULK)
    swarm.held.add(lane)
    begin(swarm.gateway)
    [hop] = [hop for first, hop in hops_of(swarm) if first == 1]
    assert (hop.received, hop.kv) == (len(LOG), 0)
    assert not swarm.gateway.tokens("a")
    swarm.held.remove(lane)
    swarm.run()
    assert swarm.gateway.tokens("a") == right()


@pytest.mark.parametrize(("first", "entry", "size"), [(0, 0, 8), (1, 0, 8), (1, COUNT, 16)])
def test_rows_of_another_size_are_a_fault(first: int, entry: int, size: int) -> None:
    swarm = swarm_of(*SPANS)
    begin(swarm.gateway, ahead=3)
    [server] = [server for server in swarm.servers.values() if server.hello.first == first]
    [hop] = server.core._fencing.hops
    wrong = Input(hop.handle, hop.epoch, entry, ENTRIES[:1], bytes(size))
    server.core.receive(swarm.gateway.peer, wrong, swarm.now)
    [report] = [s.item for s in server.core.take_sends() if isinstance(s.item, FaultReport)]
    expected = {0: 8 * (1 + BLOCKS), 1: 16 if entry < COUNT else 0}[first]
    assert report.detail == f"the row of entry {entry} has {size} bytes, {expected} are expected"


def test_session_migrates_to_no_older_server() -> None:
    swarm = swarm_of(*SPANS)
    swarm.serve(1, 3, OLD)
    begin(swarm.gateway, ahead=3)
    route = swarm.gateway.route("a")
    swarm.core.migrations.drain(route[1], "drain", swarm.now)
    swarm.wait(5.0)
    assert swarm.gateway.route("a") == route
    new = swarm.serve(1, 3).peer
    swarm.wait(5.0)
    swarm.gateway.read("a")
    swarm.wait(5.0)
    assert swarm.gateway.route("a") == [route[0], new, route[2]]
    assert swarm.gateway.tokens("a") == right()


def test_rebalancing_chooses_no_older_server() -> None:
    swarm = swarm_of(*SPANS)
    old = swarm.serve(1, 3, OLD).peer
    begin(swarm.gateway, ahead=3)
    session = swarm.core._sessions["a"]
    assert not swarm.core.migrations.migrate(session, session.hops[1], old, swarm.now)
    new = swarm.serve(1, 3).peer
    assert swarm.core.migrations.migrate(session, session.hops[1], new, swarm.now)


def test_hop_that_waits_for_its_rows_is_not_ejected() -> None:
    """The counters show only rows of the predecessor, all of which have come."""
    swarm = swarm_of(*SPANS)
    begin(swarm.gateway, (1, 2, 3), (), session="w")  # the times of steps are known
    [middle] = [peer for peer, server in swarm.servers.items() if server.hello.first == 1]
    lane = (swarm.gateway.peer, middle, Lane.BULK)
    swarm.held.add(lane)
    begin(swarm.gateway)
    for _ in range(100):
        swarm.wait(0.1)
        assert not swarm.core._registry.health_status(middle, swarm.now).ejected
    swarm.held.remove(lane)
    swarm.run()
    swarm.wait(5.0)
    assert swarm.gateway.tokens("a") == right()


def test_hop_drops_rows_as_they_run() -> None:
    """A log of rows only: the last of them has not run when the session is parked."""
    swarm = swarm_of(*SPANS)
    swarm.core.open_session("a", MODEL, swarm.now, 0)
    request = TurnRequest(ENTRIES, 0, Sampling(), opaque=dict(enumerate(packed(ROWS))))
    swarm.core.start_turn("a", request, swarm.now)
    swarm.run()
    [hop] = [hop for first, hop in hops_of(swarm) if first == 1]
    assert (hop.kv, list(hop.opaque)) == (COUNT - 1, [COUNT - 1])


def test_tokens_behind_rows_travel_many_in_a_message() -> None:
    rows = {0: bytes(100), 1: bytes(100)}
    assert list(split_entries(0, 25, rows, 10, 100)) == [
        (0, 1),
        (1, 2),
        (2, 12),
        (12, 22),
        (22, 25),
    ]
    assert list(split_entries(1, 3, rows, 10, 1000)) == [(1, 2), (2, 3)]
    assert list(split_entries(0, 5, {}, 2, 1)) == [(0, 2), (2, 4), (4, 5)]
    assert list(split_entries(0, 4, {3: bytes(60)}, 10, 100)) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert list(split_entries(5, 5, rows, 10, 100)) == []
