"""KV transfer at the servers: a hop is copied to another server while it serves, on the hash model (R13, migration)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.kv_transfer import (
    CONTEXT,
    NEW,
    READ,
    WARM_REPLY,
    Spare,
    copying,
    open_hop,
    opened_beside,
    order,
    run_without,
    running,
    warm,
)
from support.core.scripted_gateway import GATEWAY, ServerNetwork
from support.core.server import Server

from modelswarm.protocol.messages import (
    CopyKv,
    Create,
    FaultKind,
    Fence,
    FenceAck,
    Lane,
    Neighbour,
    Rows,
    Token,
    Window,
)
from modelswarm_serving.model.base import KvRead, KvWrite, Result


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_copied_hop_takes_over_without_running_rows_twice(hop: int, seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client = running(network, row_window=8, token_budget=8)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare = copying(client, hop, row_window=8, token_budget=8)
    spare.feed()
    client.raise_credit(CONTEXT + READ + 10)  # the session continues during the copy
    done = len(client.log)
    for _ in range(300):
        network.run(3)
        client.listen()
        spare.feed()
    client.finish()
    assert [token.token for token in client.tokens][READ + 1 :] == rest[: len(client.log) - done]
    assert len(client.log) > done and not client.reports and not spare.reports
    assert spare.kv >= len(client.log) - 1 and not spare.server.core.stats.rows
    after = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare.switch()
    client.refence()
    assert client.fenced[hop].kv == len(client.log) - 1 and client.fenced[hop].counters is None
    before = [server.core.stats.rows for server, _, _ in client.hops]
    assert [token.token for token in client.resume()] == after
    ran = [
        server.core.stats.rows - b for (server, _, _), b in zip(client.hops, before, strict=True)
    ]
    assert ran == [len(after)] * 3


def test_standby_hop_sends_only_fence_acks_and_windows() -> None:
    network = ServerNetwork()
    client = running(network)
    for hop in (1, 2):
        spare = copying(client, hop)
        spare.feed()
        network.run()
        sent = {type(s.item) for name, s in network.record if name == spare.server.peer}
        assert sent == {FenceAck, Window}
        assert spare.kv == len(client.log) - 1
    assert not [i for _, i in network.answers if isinstance(i, Token) and i.handle == WARM_REPLY]


def test_copied_rows_go_on_bulk_marked_as_kv_copy() -> None:
    network = ServerNetwork()
    client = running(network)
    spare = copying(client, 2)
    del network.record[:]
    network.run()
    rows = [send for send in network.sent(Rows) if send.to.peer == spare.server.peer]
    assert rows and all(send.lane is Lane.BULK for send in rows)
    assert all(isinstance(send.item, Rows) and send.item.kv_copy for send in rows)


def test_rows_of_a_copy_that_come_again_are_not_written() -> None:
    network = ServerNetwork()
    client = running(network)
    spare = copying(client, 2)
    network.run()
    rows = [send.item for send in network.sent(Rows) if send.to.peer == spare.server.peer]
    steps = spare.server.core.stats.steps
    for item in rows:
        network.put(client.hops[2][0].peer, spare.server.peer, item, Lane.BULK)
    network.run()
    assert rows and spare.kv == len(client.log) - 1 and not spare.reports
    assert spare.server.core.stats.steps == steps


def test_kv_copy_rows_are_ignored_by_a_serving_hop() -> None:
    network = ServerNetwork()
    client = running(network)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    middle = client.hops[1][0]
    at = len(client.log) - 1
    stray = Rows(client.own[1], client.epoch, at, 1, bytes(8), kv_copy=True)
    network.put(client.hops[0][0].peer, middle.peer, stray)
    client.raise_credit(1000)
    client.finish()
    assert [token.token for token in client.tokens][READ + 1 :] == rest and not client.reports


def kept(server: Server) -> int:
    return server.core.stats.replay_bytes


def test_copy_includes_retained_rows_and_works_without_them() -> None:
    for replay_bytes in (0, 1 << 20):
        network = ServerNetwork()
        client = running(network, replay_bytes=replay_bytes)
        spare = copying(client, 1)
        network.run()
        assert spare.kv == len(client.log) - 1 and not spare.reports and not client.reports
        assert (kept(spare.server) > 0) == (replay_bytes > 0)
        assert bool(kept(client.hops[1][0])) == bool(kept(spare.server))


def test_failed_kv_read_ends_only_the_copy() -> None:
    network = ServerNetwork()
    client = running(network)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare = copying(client, 1)
    old = client.hops[1][0]
    network.run(until=lambda: any(isinstance(task, KvRead) for task in old.out))
    old.end_step(network.now, [Result(error="the device is lost")] * len(old.out))
    network.run()
    client.listen()
    assert [(report.kind, report.peer) for report in client.reports] == [
        (FaultKind.FAILED, spare.server.peer)
    ]
    client.raise_credit(1000)
    client.finish()
    assert [token.token for token in client.tokens][READ + 1 :] == rest


def test_broken_link_ends_only_the_copy() -> None:
    network = ServerNetwork()
    client = running(network)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare = copying(client, 1)
    network.run()
    network.cut_link(client.hops[1][0].peer, spare.server.peer)
    client.raise_credit(1000)
    client.finish()
    assert [(report.kind, report.peer) for report in client.reports] == [
        (FaultKind.LINK_DOWN, spare.server.peer)
    ]
    assert [report.kind for report in spare.reports] == [FaultKind.LINK_DOWN]
    assert [token.token for token in client.tokens][READ + 1 :] == rest


def test_cancelled_copy_sends_no_more_rows() -> None:
    network = ServerNetwork()
    client = running(network)
    spare = copying(client, 2)
    network.run()
    client.put(2, CopyKv(client.own[2], client.epoch, None))
    network.run()
    had = spare.kv
    client.raise_credit(1000)
    client.finish()
    assert 0 < spare.kv == had < len(client.log) - 1 and not client.reports


@pytest.mark.parametrize("seed", range(8))
def test_second_copy_ignores_windows_of_the_first(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client = running(network, row_window=4)
    spare = copying(client, 1, row_window=4)
    network.run(network.random.randrange(200))
    other = opened_beside(client, 2, row_window=4)  # another copy, so that the next handle is new
    network.remove(other.server.peer)
    spare.server.core._fencing.free_hop(spare.server.core._fencing.hops.get(spare.own))  # type: ignore[arg-type]
    spare.own = open_hop(client, spare.server, 2, 4)
    warm(spare)
    order(spare)
    network.run()
    assert not spare.reports and not client.reports
    assert spare.kv == len(client.log) - 1


@pytest.mark.parametrize("late", [False, True])
def test_second_copy_waits_for_its_own_windows(late: bool) -> None:
    """A late window of the first copy names more positions than the second copy has sent."""
    network = ServerNetwork()
    client = running(network)
    spare = copying(client, 1)
    network.run()
    peer, source = spare.server.peer, client.hops[1][0].peer
    windows = [s.item for s in network.sent(Window, peer) if isinstance(s.item, Window)]
    last = [window for window in windows if window.kv_copy][-1]
    assert last.limit >= len(client.log) - 1
    client.put(1, CopyKv(client.own[1], client.epoch, None))
    spare.server.core._fencing.free_hop(spare.server.core._fencing.hops.get(spare.own))  # type: ignore[arg-type]
    spare.own = open_hop(client, spare.server, 2, 4)
    if late:
        network.put(peer, source, replace(last, received=30))
        network.run()
    del network.record[:]
    order(spare)
    network.run()
    assert not network.sent(Rows, source), "no window is granted yet"
    warm(spare)
    network.run()
    assert not spare.reports and not client.reports
    assert spare.kv == len(client.log) - 1


def test_input_before_start_epoch_of_standby_tail_is_kept() -> None:
    network = ServerNetwork()
    client = running(network)
    spare = opened_beside(client, 2)
    length = len(client.log)
    client.raise_credit(CONTEXT + READ + 5)
    client.finish()
    spare.feed()
    network.run()
    warm(spare, length=length)
    order(spare)
    network.run()
    assert spare.kv == len(client.log) - 1
    client.raise_credit(1000)
    client.finish()
    spare.feed()
    network.run()
    assert not spare.reports and spare.kv == len(client.log) - 1


def test_each_hop_of_a_chain_gets_its_part_of_the_blocks() -> None:
    network = ServerNetwork()
    client = running(network, hops=2)  # blocks 0:3 and 3:6; the second becomes 3:5 and 5:6
    servers = [network.serve(3, 5), network.serve(5, 6)]
    owns = [open_hop(client, servers[0], 3, 5), open_hop(client, servers[1], 5, 6)]
    chain = [Neighbour(s.address, own) for s, own in zip(servers, owns, strict=True)]
    for hop, server, blocks in zip(chain, servers, [(3, 5), (5, 6)], strict=True):
        spare = Spare(client, 1, server, hop.handle)
        warm(spare)
        spare.feed()
        client.put(1, CopyKv(client.own[1], client.epoch, hop, 0, *blocks))
    network.run()
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    client.hops[1:] = [(servers[0], 3, 5), (servers[1], 5, 6)]
    client.own[1:] = owns
    client.refence()
    assert [fenced.kv for fenced in client.fenced.values()] == [len(client.log) - 1] * 3
    assert [token.token for token in client.resume()] == rest


def test_kv_written_after_a_failed_write_does_not_count() -> None:
    network = ServerNetwork()
    client = running(network)
    spare = copying(client, 1)
    network.run()
    had = spare.kv
    client.raise_credit(CONTEXT + READ + 3)
    run_without(network, spare.server)
    spare.server.begin_step(network.now)
    assert [type(task) for task in spare.server.out] == [KvWrite] * 3
    results = [Result(), Result(error="the device is lost"), Result()]
    spare.server.end_step(network.now, results)
    network.run()
    assert [report.kind for report in spare.reports] == [FaultKind.FAILED]
    client.fence()
    create = Create(client.session, 2, 4, for_recovery=True)
    fence = Fence(spare.own, WARM_REPLY, client.epoch, 1000, 1000, create)
    network.put(GATEWAY, spare.server.peer, fence)
    network.run()
    answers = [i for _, i in network.answers if isinstance(i, FenceAck) and i.handle == WARM_REPLY]
    assert answers[-1].kv == had + 1
