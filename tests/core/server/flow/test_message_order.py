"""Rows, tokens, inputs and windows that are late, repeated, reordered, of another epoch, or malformed.

R1 (rows never truncate), R9 (one lane at a time), R10 (nothing overtakes StartEpoch), R11 (windows).
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.core.scripted_gateway import GATEWAY, Client, ServerNetwork, prompt, route
from support.core.server import VOCABULARY

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import (
    Close,
    FaultKind,
    FaultReport,
    Fence,
    Input,
    Lane,
    OwnedSession,
    OwnedSessions,
    Rows,
    StartEpoch,
    Token,
    Window,
)


def two_hops(network: ServerNetwork, length: int = 12) -> Client:
    return Client(network, route(network, 2), prompt(length))


def test_repeated_rows_tokens_and_windows_change_nothing() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    expected = client.expected(client.log, 10)
    client.start(10)
    for _ in range(400):
        network.run(1)
        for sender, send in network.record[-3:]:
            if isinstance(send.item, Rows | Token | Window) and send.to.peer in network.servers:
                network.put(sender, send.to.peer, send.item, send.lane)
                network.record.remove((sender, send))
    assert [token.token for token in client.finish()] == expected
    assert not client.reports


def test_rows_below_received_are_dropped_and_rest_is_taken() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    expected = client.expected(client.log, 5)
    client.start(5)
    head, tail = (hop[0] for hop in client.hops)
    bulk = (head.peer, tail.peer, Lane.BULK)
    network.run(until=lambda: bulk in network.lanes)
    whole = network.lanes.pop(bulk).popleft()
    assert isinstance(whole, Rows) and (whole.first, whole.count) == (0, 11)
    network.put(head.peer, tail.peer, replace(whole, count=4, payload=whole.payload[:32]))
    network.put(head.peer, tail.peer, whole)
    assert [token.token for token in client.finish()] == expected
    assert not client.reports


def test_rows_above_received_are_reported_as_gap_of_sender() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    client.start(5)
    head, tail = (hop[0] for hop in client.hops)
    bulk = (head.peer, tail.peer, Lane.BULK)
    network.run(until=lambda: bulk in network.lanes)
    whole = network.lanes.pop(bulk).popleft()
    assert isinstance(whole, Rows)
    late = replace(whole, first=3, count=8, payload=whole.payload[24:])
    network.put(head.peer, tail.peer, late, Lane.BULK)
    client.finish()
    (report,) = client.reports
    assert (report.kind, report.peer) == (FaultKind.GAP, head.peer)
    assert (report.handle, report.epoch) == (client.base + 1, client.epoch)


def test_messages_of_older_epoch_are_dropped() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    client.start(8, credit=15)
    client.finish()
    old = list(network.record)
    client.refence()
    expected = client.expected(client.log, client.end - len(client.log))
    client.go()
    for sender, send in old:  # all earlier messages again, after the new StartEpoch
        if send.to.peer in network.servers:
            network.put(sender, send.to.peer, send.item, send.lane)
    assert [token.token for token in client.finish()] == expected
    assert not client.reports


@pytest.mark.parametrize("seed", range(20))
def test_input_may_arrive_before_or_after_start_epoch(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client = two_hops(network, 25)
    expected = client.expected(client.log, 6)
    client.refence(6)
    lanes = [Lane.LIVE, Lane.BULK]
    order = random.Random(seed)
    for hop in (0, 1):
        body = Input(client.own[hop], client.epoch, 0, tuple(client.log))
        client.put(hop, body, order.choice(lanes))
    client.go(body_lane=order.choice(lanes))
    assert [token.token for token in client.finish()] == expected
    assert not client.reports


def test_tail_samples_only_with_complete_log_copy() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    tail = client.hops[1][0]
    expected = client.expected(client.log, 4)
    client.start(4)
    body = network.lanes.pop((GATEWAY, tail.peer, Lane.BULK))  # the log copy is in flight
    client.finish()
    assert not client.tokens
    assert tail.core.stats.rows == 11  # rows below n do not need it
    network.lanes[GATEWAY, tail.peer, Lane.BULK] = body
    assert [token.token for token in client.finish()] == expected


def test_input_gap_before_start_epoch_is_reported() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    client.refence(4)
    client.put(0, Input(client.own[0], client.epoch, 5, tuple(client.log[5:])))
    client.resume()
    assert [report.kind for report in client.reports] == [FaultKind.GAP]
    assert not client.tokens


def test_window_before_start_epoch_is_kept() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    expected = client.expected(client.log, 4)
    client.refence(4)
    head = client.hops[0][0].peer
    client.go()
    late = network.lanes.pop((GATEWAY, head, Lane.LIVE))
    network.run()  # the tail has its StartEpoch and grants rows to a head without one
    assert [send.to.peer for send in network.sent(Window)] == [head]
    network.lanes[GATEWAY, head, Lane.LIVE] = late
    assert [token.token for token in client.finish()] == expected


def test_rows_before_start_epoch_are_used_at_start_epoch() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    expected = client.expected(client.log, 4)
    client.refence(4)
    head, tail = (hop[0].peer for hop in client.hops)
    # a forged window lets the head send rows before the tail has its StartEpoch
    network.put(tail, head, Window(client.own[0], client.epoch, 0, 10))
    client.go()
    late = network.lanes.pop((GATEWAY, tail, Lane.LIVE))
    network.run()
    assert len(network.sent(Rows)) == 1 and not client.reports
    network.lanes[GATEWAY, tail, Lane.LIVE] = late
    assert [token.token for token in client.finish()] == expected


def test_rows_beyond_granted_window_are_reported() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2, row_window=4), prompt(12))
    client.start(4)
    head, tail = (hop[0].peer for hop in client.hops)
    network.put(tail, head, Window(client.own[0], client.epoch, 0, 10))  # forged
    client.finish()
    assert {report.kind for report in client.reports} == {FaultKind.FAILED}


NONSENSE = [
    {"count": 0, "payload": b""},
    {"count": -1},
    {"count": 1 << 60},
    {"count": 3},
    {"first": -3},
    {"first": -11},
    {"payload": b""},
    {"payload": b"1234567"},
    {"count": 4000, "payload": bytes(32000)},
]


@pytest.mark.parametrize("changes", NONSENSE)
def test_malformed_rows_fail_only_their_session(changes: dict[str, object]) -> None:
    network = ServerNetwork()
    client = two_hops(network)
    other = Client(network, client.hops, prompt(15, 1), session="other", base=500)
    expected = other.expected(other.log, 9)
    client.start(5)
    other.fence(9)
    head, tail = (hop[0] for hop in client.hops)
    bulk = (head.peer, tail.peer, Lane.BULK)
    network.run(until=lambda: bulk in network.lanes)
    whole = network.lanes.pop(bulk).popleft()
    assert isinstance(whole, Rows)
    nonsense = replace(whole, **changes)  # type: ignore[arg-type]
    network.put(head.peer, tail.peer, nonsense)
    client.finish()
    assert [report.kind for report in client.reports] == [FaultKind.FAILED]
    other.listen()
    assert [token.token for token in other.resume()] == expected
    # the session itself continues after a fence
    expected = client.expected(client.log, 5)
    client.refence()
    assert [token.token for token in client.resume()] == expected


def test_rows_from_unknown_peer_are_dropped() -> None:
    network = ServerNetwork()
    client = two_hops(network)
    expected = client.expected(client.log, 5)
    client.start(5)
    forged = Rows(client.own[1], client.epoch, 0, 1, bytes(8))
    for _ in range(3):
        network.run(2)
        network.put("thief/1/x", client.hops[1][0].peer, forged)
    assert [token.token for token in client.finish()] == expected


@pytest.mark.parametrize("tokens", [(VOCABULARY,), (-1,), (0,) * 1000])
def test_invalid_input_tokens_are_reported(tokens: tuple[int, ...]) -> None:
    network = ServerNetwork()
    client = two_hops(network)
    client.start(5)
    network.lanes.clear()
    client.put(0, Input(client.own[0], client.epoch, 0, tokens))
    client.finish()
    assert [report.kind for report in client.reports] == [FaultKind.FAILED]


def _nonsense(choose: random.Random, handles: list[int]) -> object:
    def number() -> int:
        return choose.choice([-1, 0, 1, 2, 3, 5, 8, 13, 1 << 31, 1 << 63, -(1 << 63)])

    handle = choose.choice([*handles, 0, number()])
    epoch = Epoch(choose.choice([0, 1, 2]), 1)
    kind = choose.randrange(8)
    if kind == 0:
        size = choose.choice([0, 7, 8, 16, 80])
        return Rows(handle, epoch, number(), number(), bytes(size), bool(choose.randrange(2)))
    if kind == 1:
        return Token(handle, epoch, number(), number(), store_only=bool(choose.randrange(2)))
    if kind == 2:
        return Window(handle, epoch, number(), number())
    if kind == 3:
        return Input(handle, epoch, number(), tuple(number() for _ in range(choose.randrange(4))))
    if kind == 4:
        go = StartEpoch(
            handle, epoch, number(), number(), number(), None, None, None, number(), number()
        )
        return replace(go, sample=bool(choose.randrange(2)))
    if kind == 5:
        return Fence(handle, number(), epoch, number(), number())
    if kind == 6:
        return Close(handle)
    return FaultReport(handle, epoch, FaultKind.GAP)


@pytest.mark.parametrize("seed", range(100))
def test_random_messages_of_peer_disturb_no_other_session(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client = two_hops(network)
    victim = Client(network, client.hops, prompt(20, 1), session="v", base=500)
    evil = "evil/1/x"
    network.add_gateway(evil)
    expected = client.expected(client.log, 15)
    victim.gateway = evil
    victim.start(15)
    client.start(15)
    for _ in range(60):
        network.run(3)
        name = network.random.choice(list(network.servers))
        item = _nonsense(network.random, victim.own)
        sender = network.random.choice([evil, *(peer for peer in network.servers if peer != name)])
        network.put(sender, name, item)  # type: ignore[arg-type]
    assert [token.token for token in client.finish()] == expected
    assert not client.reports
    for name in network.servers:
        network.put(evil, name, OwnedSessions(()))
        network.put(GATEWAY, name, OwnedSessions((OwnedSession("a", 1, client.epoch),)))
    network.run()
    assert network.free_pages == [64, 64]


def test_oversized_rows_before_start_epoch_are_not_kept() -> None:
    """Early rows are limited by their number: a thousand of 4 MiB each would fill the memory."""
    network = ServerNetwork()
    client = two_hops(network)
    client.refence(5)
    head, tail = (hop[0].peer for hop in client.hops)
    for first in range(64):
        network.put(head, tail, Rows(client.own[1], client.epoch, first, 1, bytes(1 << 16)))
    network.run()
    [hop] = network.servers[tail].core._fencing.hops
    assert not hop.early.rows
    expected = client.expected(client.log, 5)
    assert [token.token for token in client.resume()] == expected


@pytest.mark.parametrize("count", [1, 3, 8])
def test_early_rows_are_kept_up_to_the_row_window(count: int) -> None:
    """The window bounds the rows of all messages together. Their sender is not the predecessor: none is run."""
    network = ServerNetwork()
    client = Client(network, route(network, 2, row_window=8), prompt(12))
    other, tail = network.serve(0, 3), client.hops[1][0]
    client.refence(5)
    for first in range(0, 64, count):
        rows = Rows(client.own[1], client.epoch, first, count, bytes(8 * count))
        network.put(other.peer, tail.peer, rows)
    network.run()
    [hop] = tail.core._fencing.hops
    assert sum(rows.count for _, rows in hop.early.rows) == 8 // count * count
    expected = client.expected(client.log, 5)
    assert [token.token for token in client.resume()] == expected
    assert not client.reports
