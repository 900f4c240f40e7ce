"""Opaque rows (R14), with both cores: they are part of the log, and survive whatever the log survives."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest
from support.core.gateway import TWICE, Gateway, Swarm, add_gateway, swarm_of
from support.core.server import MODEL, VOCABULARY, reference_rows

from modelswarm.protocol.messages import FaultKind, FaultReport, Finish, Input, Sampling
from modelswarm.protocol.opaque import opaque_entries
from modelswarm_gateway.core.interface.effects import Ejected, Emitted, SessionLost
from modelswarm_gateway.core.interface.errors import CoreError
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_serving.model.hash_model import mix, sample_token

NEW = 30
ROWS = [struct.pack("<Q", mix(n)) for n in range(6)]
MIDDLE = [(7 * at) % VOCABULARY for at in range(10)]


def entries(rows: Sequence[bytes] = ROWS) -> tuple[int, ...]:
    return opaque_entries(rows)


LOG = (*MIDDLE, *entries(), 5, 6, 7)
OPAQUE = {len(MIDDLE) + at: row for at, row in enumerate(ROWS)}


def begin(
    gateway: Gateway,
    log: Sequence[int] = LOG,
    opaque: dict[int, bytes] = OPAQUE,
    session: str = "a",
    ahead: int = 1000,
    parent: str = "",
) -> None:
    """Start a turn; the first one opens the session."""
    core, network = gateway.core, gateway.network
    if core.find_view(session) is None:
        core.open_session(session, MODEL, network.now, 0)
    request = TurnRequest(
        tuple(log), NEW, Sampling(), credit_ahead=ahead, opaque=opaque, parent=parent
    )
    core.start_turn(session, request, network.now)
    network.run()


def right(log: Sequence[int] = LOG, opaque: dict[int, bytes] = OPAQUE, new: int = NEW) -> list[int]:
    """Return the tokens after the log."""
    made = list(log)
    values = {at: struct.unpack("<Q", row)[0] for at, row in opaque.items()}
    for _ in range(new):
        row = reference_rows(made, values)[-1]
        made.append(sample_token(row, Sampling(), len(made), made, len(log), VOCABULARY).token)
    return made[len(log) :]


def test_row_in_the_log_counts_for_every_token() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    begin(swarm.gateway)
    assert swarm.gateway.tokens("a") == right()
    changed = {**OPAQUE, len(MIDDLE) + 2: ROWS[0]}
    log = (*MIDDLE, *entries([changed[at] for at in sorted(changed)]), 5, 6, 7)
    swarm.gateway.effects.clear()
    begin(swarm.gateway, log, changed)
    assert swarm.gateway.tokens("a") == right(log, changed) != right()


def test_later_turn_continues_behind_rows() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    begin(swarm.gateway)
    log = (*LOG, *right(), 9)
    swarm.gateway.effects.clear()
    begin(swarm.gateway, log, {})
    assert swarm.gateway.tokens("a") == right(log)
    with pytest.raises(CoreError, match="entry 10 of the input is a row"):
        begin(swarm.gateway, LOG, {}, session="b")


def test_rows_with_one_hash_are_told_apart() -> None:
    """The entries are equal, but not the rows: the log is discarded from the first of them on."""
    swarm = swarm_of((0, 2), (2, 4))
    begin(swarm.gateway)
    other = {**OPAQUE, len(MIDDLE) + 1: ROWS[5]}
    swarm.gateway.effects.clear()
    begin(swarm.gateway, LOG, other)
    assert swarm.gateway.tokens("a") == right(LOG, other)


@pytest.mark.parametrize("seed", range(20))
def test_kills_and_drains_do_not_change_tokens(seed: int) -> None:
    rng = random.Random(seed)
    swarm = swarm_of((0, 2), (2, 3), (3, 4), (0, 2), (2, 3), (3, 4))
    begin(swarm.gateway, ahead=rng.choice((1, 5)))
    for position in range(len(LOG), len(LOG) + NEW):
        swarm.disturb(rng)
        swarm.gateway.read("a", position)
        swarm.wait(0.1)
    swarm.gateway.read("a")
    swarm.wait(1.0)
    assert swarm.gateway.tokens("a") == right()


@pytest.mark.parametrize("lost", [(0, 2), (2, 4)])
def test_another_gateway_takes_rows_over(lost: tuple[int, int]) -> None:
    """Head and tail have them. One of the two is lost after the takeover, and computes them anew."""
    swarm = swarm_of(*TWICE)
    begin(swarm.gateway, ahead=5)
    swarm.kill(swarm.gateway.peer)
    other = add_gateway(swarm, 2)
    where = other.find("a")
    swarm.wait(where.takeover_wait + 1)
    where = other.find("a")
    log = other.adopt(where)
    assert tuple(log[: len(LOG)]) == LOG
    swarm.kill(
        next(peer for peer in other.route("a") if swarm.servers[peer].hello.first == lost[0])
    )
    begin(other, LOG, {})
    other.read("a")
    assert other.tokens("a") == right()


def test_fork_has_the_rows_of_its_parent() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    begin(swarm.gateway)
    begin(swarm.gateway, (*LOG, 1), {}, session="b", parent="a")
    assert swarm.gateway.tokens("b") == right((*LOG, 1))
    swarm.core.close_session("a", swarm.now)
    victim = swarm.servers[swarm.gateway.route("b")[0]]
    swarm.kill(victim.peer)
    swarm.serve(*SPAN)
    swarm.gateway.effects.clear()
    begin(swarm.gateway, (*LOG, 2), {}, session="b")
    assert swarm.gateway.tokens("b") == right((*LOG, 2))


def test_fork_copies_no_kv_of_other_rows_with_the_same_hash() -> None:
    swarm = swarm_of((0, 2), (2, 4))
    begin(swarm.gateway)
    other = {**OPAQUE, len(MIDDLE) + 1: ROWS[5]}
    begin(swarm.gateway, LOG, other, session="b", parent="a")
    assert swarm.gateway.tokens("b") == right(LOG, other)


SPAN = (0, 2)


def test_many_rows_come_in_small_messages() -> None:
    swarm = Swarm()
    swarm.serve(0, 4, row_bytes=1 << 16)
    rows = [ROWS[at % 6] * (1 << 13) for at in range(9)]
    log = (*opaque_entries(rows), 3)
    begin(swarm.gateway, log, dict(enumerate(rows)))
    sent = [send.item for send in swarm.sent(Input) if isinstance(send.item, Input)]
    assert max(len(item.rows) for item in sent) <= 128 << 10
    assert [each.finish for each in swarm.gateway.all(Emitted)][-1] is Finish.LENGTH
    assert swarm.gateway.tokens("a") == right(log, {at: row[:8] for at, row in enumerate(rows)})


def test_rows_take_the_memory_of_retained_rows() -> None:
    """The plan of a server has memory for one row of each position, and not for two."""
    words = 100
    swarm = swarm_of((0, 2), (2, 4), row_bytes=8 * words, replay_bytes=6000)
    head = next(each for each in swarm.servers.values() if each.hello.first == 0)
    begin(swarm.gateway, (1, 2, 3), {}, session="b", ahead=2)
    swarm.wait(0.1)
    assert head.core.stats.replay_bytes > 2000
    rows = [struct.pack("<Q", mix(n)) * words for n in range(6)]
    begin(swarm.gateway, (*entries(rows), 5), dict(enumerate(rows)), ahead=2)
    swarm.wait(0.1)
    assert head.core.stats.replay_bytes <= 6000 - 6 * 8 * words


def test_rows_that_give_no_finite_logits_eject_no_server() -> None:
    swarm = swarm_of((0, 4))
    begin(swarm.gateway, ahead=3)
    [(_, hop)] = swarm.core._recovery.hops.by_handle.values()
    epoch = swarm.gateway.view("a").epoch
    report = FaultReport(hop.gateway_handle, epoch, FaultKind.NOT_FINITE, detail="NaN")
    swarm.core.receive(hop.peer, report, swarm.now)
    swarm.run()
    assert len(swarm.gateway.all(SessionLost)) == 1
    assert not swarm.gateway.all(Ejected)
