"""Fence and StartEpoch: truncation and opening of hops, frozen counters, and recovery by both.

R2 (fencing), R3 (lowest cuts), R5 (one loop), R6 (replay), R8 (parked).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.scripted_gateway import (
    GATEWAY,
    Client,
    ServerNetwork,
    again,
    opened,
    prompt,
    route,
    start_all,
)

from modelswarm.protocol.identity import NO_GATEWAY, Epoch
from modelswarm.protocol.messages import (
    Close,
    Create,
    FaultKind,
    Fence,
    FenceAck,
    Lane,
    Refusal,
    Sampling,
    StartEpoch,
    Turn,
)


def test_repeated_fence_before_start_epoch_gives_same_answer() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(12))
    client.fence(8)
    again(network, client, Fence)
    network.run()
    answers = [item for _, item in network.answers]
    assert len(answers) == 4 and answers[0] in answers[1:] and len(set(map(repr, answers))) == 2
    assert [server.core.stats.sessions for server in network.servers.values()] == [1, 1]


def test_repeated_fence_after_start_epoch_truncates_nothing() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(12))
    expected = client.expected(client.log, 8)
    client.fence(8)
    fences = {key: list(items) for key, items in network.lanes.items()}
    network.run()
    client.listen()
    gos = client.go()
    again(network, client, StartEpoch)
    for _ in range(30):
        network.run(12)
        for (sender, to, lane), items in fences.items():
            for item in items:
                network.put(sender, to, item, lane)
        for index, go in enumerate(gos):
            client.put(index, go)
    assert [token.token for token in client.finish()] == expected
    assert len([item for _, item in network.answers if isinstance(item, FenceAck)]) == 2
    assert not client.reports
    assert [server.core.stats.rows for server in network.servers.values()] == [12 + 7] * 2


def test_stale_fence_is_ignored_and_unknown_handle_answered() -> None:
    network = ServerNetwork()
    client = opened(network)
    server = client.hops[0][0]
    before = len(network.answers)
    client.put(0, Fence(client.own[0], 7, Epoch(0, 9), 0, 0))
    network.run()
    assert len(network.answers) == before
    client.put(0, Fence(12345, 7, Epoch(0, 9), 0, 0))
    network.run()
    answer = network.answers[-1][1]
    assert isinstance(answer, FenceAck)
    assert (answer.handle, answer.server_handle, answer.epoch, answer.unknown) == (
        7,
        0,
        Epoch(0, 9),
        True,
    )
    assert server.core.stats.sessions == 1


def test_create_is_idempotent_per_session_and_blocks() -> None:
    network = ServerNetwork()
    whole = network.serve(0, 6)
    name = whole.peer
    turn = Turn(10, 11)
    for reply, (first, last) in enumerate([(0, 3), (3, 6), (0, 3)], start=1):
        create = Create("a", first, last)
        network.put(GATEWAY, name, Fence(0, reply, Epoch(1, 1), 0, 0, create, turn))
    network.run()
    first_, second, third = (item for _, item in network.answers)
    assert (
        isinstance(first_, FenceAck)
        and isinstance(second, FenceAck)
        and isinstance(third, FenceAck)
    )
    assert third == replace(first_, handle=3)  # the gateway has given the hop another handle
    assert second.server_handle not in (0, first_.server_handle)
    assert whole.core.stats.sessions == 2


def test_counters_freeze_at_first_fence_after_start_epoch() -> None:
    network = ServerNetwork()
    client = opened(network, hops=3)
    assert [answer.counters for answer in client.fenced.values()] == [None] * 3
    client.go(credit=15)
    ran = client.epoch
    client.finish()
    for _ in range(3):  # also for later fences without a StartEpoch
        client.refence()
        head, middle, tail = (client.fenced[at].counters for at in range(3))
        assert head and middle and tail
        assert head.epoch == middle.epoch == tail.epoch == ran
        assert head.sent == middle.received == 15
        assert middle.sent == tail.received == 15
        assert head.window == middle.granted == middle.window == tail.granted == 19
        assert tail.tokens_sent == head.tokens_received == 15


def test_frozen_counters_show_link_that_lost_rows() -> None:
    network = ServerNetwork()
    client = opened(network, hops=3)
    client.go()
    one, two = client.hops[1][0].peer, client.hops[2][0].peer
    network.run(until=lambda: (one, two, Lane.BULK) in network.lanes)
    network.lanes.pop((one, two, Lane.BULK))
    network.run()
    client.refence()
    head, middle, tail = (client.fenced[at].counters for at in range(3))
    assert head and middle and tail
    assert head.sent <= middle.received and middle.sent > tail.received


def test_late_input_does_not_show_as_lost_token() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.go()
    network.lanes.pop((GATEWAY, client.hops[0][0].peer, Lane.BULK))
    network.run()
    client.refence()
    head, tail = client.fenced[0].counters, client.fenced[1].counters
    assert head and tail and head.tokens_received >= tail.tokens_sent


def test_fence_during_step_is_answered_when_step_retires() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.go()
    tail = client.hops[1][0]
    network.run(until=lambda: bool(tail.out))
    before = len(network.answers)
    client.fence(kv_cut=5, log_cut=6)
    tail.core.receive(GATEWAY, network.lanes[GATEWAY, tail.peer, Lane.LIVE].pop(), 0.0)
    network.deliver_all(to=GATEWAY)
    assert len(network.answers) == before  # not while the step runs
    tail.end_step(0.0)
    network.deliver_all(to=GATEWAY)
    (answer,) = (item for _, item in network.answers[before:])
    assert isinstance(answer, FenceAck)
    assert (answer.kv, answer.log, answer.epoch) == (5, 6, client.epoch)


def test_fences_during_step_merge_to_lowest_truncation() -> None:
    network = ServerNetwork()
    client = opened(network, length=20)
    client.go()
    tail = client.hops[1][0]
    network.run(until=lambda: bool(tail.out))
    fence = Fence(client.own[1], 101, Epoch(2, 1), 4, 5, turn=Turn(90, 91, Sampling(seed=5)))
    tail.core.receive(GATEWAY, fence, 0.0)
    tail.core.receive(
        GATEWAY, replace(fence, epoch=Epoch(3, 1), kv_cut=9, log_cut=9, turn=None), 0.0
    )
    tail.core.receive(GATEWAY, fence, 0.0)
    network.deliver_all(to=GATEWAY)
    before = len(network.answers)
    tail.end_step(0.0)
    network.deliver_all(to=GATEWAY)
    (answer,) = (item for _, item in network.answers[before:])
    assert isinstance(answer, FenceAck)
    assert (answer.kv, answer.log, answer.epoch) == (4, 5, Epoch(3, 1))
    assert answer.free_pages == 64 - 23


def test_hop_closed_during_step_frees_pages_when_it_retires() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.go()
    tail = client.hops[1][0]
    network.run(until=lambda: bool(tail.out))
    tail.core.receive(GATEWAY, Close(client.own[1]), 0.0)
    assert tail.core.stats.sessions == 0 and tail.core.stats.free_pages < 64
    create = Create("a", 3, 6)  # the same blocks again, while the old hop's step runs
    tail.core.receive(GATEWAY, Fence(0, 300, Epoch(1, 1), 0, 0, create, Turn(10, 11)), 0.0)
    tail.end_step(0.0)
    assert tail.core.stats.free_pages == 64 - 3
    network.deliver_all(to=GATEWAY)
    answer = network.answers[-1][1]
    assert isinstance(answer, FenceAck) and answer.server_handle not in (0, client.own[1])


def test_lower_start_truncates_kv_and_rows_run_again() -> None:
    network = ServerNetwork()
    client = opened(network, hops=3, length=30, replay_bytes=0)
    client.resume(credit=35)
    spare = network.serve(2, 4)
    client.replace_hop(1, spare)
    client.refence(repair=True)
    length = len(client.log)
    assert [client.fenced[at].kv for at in range(3)] == [length - 1, 0, length - 1]
    expected = client.expected(client.log, client.end - length)
    gos = client.go()
    # no retained rows: the head restarts from its tokens, the tail keeps its KV and gets no earlier rows
    assert [go.start for go in gos] == [0, 0, length - 1]
    assert gos[1].send_from == length - 1
    assert [token.token for token in client.finish()] == expected
    assert client.hops[2][0].core.stats.rows < 60


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_server_lost_at_any_moment_costs_no_token(hops: int, seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client = opened(network, hops=hops, length=25, new=30)
    whole = client.expected(client.log, 30)
    client.go()
    for _ in range(3):
        network.run(network.random.randrange(5, 60))
        client.listen()
        lost = network.random.randrange(hops)
        server, first, last = client.hops[lost]
        network.kill(server.peer)
        client.replace_hop(lost, network.serve(first, last))
        client.fence(repair=True)
        while len(client.fenced) < hops:
            network.run(1)
            client.listen()
        client.go()
    client.finish()
    assert client.log[25:] == whole


@pytest.mark.parametrize("seed", range(20))
def test_broken_link_between_servers_costs_no_token(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client = opened(network, hops=3, length=40, new=30)
    whole = client.expected(client.log, 30)
    client.go()
    for _ in range(4):
        network.run(network.random.randrange(5, 60))
        one, two = network.random.sample([hop[0].peer for hop in client.hops], 2)
        network.cut_link(one, two)
        client.listen()
        for report in client.reports:
            assert report.kind is FaultKind.LINK_DOWN and report.generation > 0
        client.fence()
        while len(client.fenced) < 3:
            network.run(1)
            client.listen()
        client.go()
    client.finish()
    assert client.log[40:] == whole


def test_broken_link_is_reported_once_by_each_end() -> None:
    network = ServerNetwork()
    client = opened(network, hops=3)
    for generation in (1, 2):
        client.resume(credit=15)
        one, two = (client.hops[at][0].peer for at in (0, 1))
        client.reports.clear()
        network.cut_link(one, two)
        client.finish()
        assert {(report.peer, report.generation) for report in client.reports} == {
            (one, generation),
            (two, generation),
        }
        network.servers[one].core.on_peer_lost(two, 0.0)  # no session runs: nothing to report
        network.servers[two].core.on_peer_lost(one, 0.0)
        network.servers[one].core._peers._break_counts[two] = generation
        network.servers[two].core._peers._break_counts[one] = generation
        client.refence()
        assert len(client.reports) == 2


def test_refused_turn_keeps_truncation_epoch_and_pages() -> None:
    network = ServerNetwork()
    client = opened(network, length=12, new=8)
    client.resume()
    free = network.free_pages
    client.refence(1000, kv_cut=6, log_cut=6)
    for answer in client.fenced.values():
        assert (answer.refusal, answer.kv, answer.epoch) == (Refusal.TOO_LONG, 6, client.epoch)
        assert answer.server_handle != 0
    assert network.free_pages == free
    client.log = [*client.log[:6], *prompt(4, seed=8)]
    expected = client.expected(client.log, 5)
    client.start(5)
    assert [token.token for token in client.finish()] == expected


def test_turn_is_refused_until_enough_pages_are_free() -> None:
    network = ServerNetwork()
    servers = route(network, 2, total_pages=20)
    one = Client(network, servers, prompt(8), session="one")
    two = Client(network, servers, prompt(8), session="two", base=200)
    start_all([one, two], 8)  # 4 pages each of 18
    assert len(one.finish()) == len(two.finish()) == 8
    one.fence(48)  # 16 pages in all
    network.run()
    one.listen()
    assert {answer.refusal for answer in one.fenced.values()} == {Refusal.NO_PAGES}
    two.close()
    expected = one.expected(one.log, 48)
    one.start(48)
    assert [token.token for token in one.finish()] == expected


def test_smaller_turn_returns_pages() -> None:
    network = ServerNetwork()
    client = opened(network, length=12, new=100)
    client.resume(credit=14)
    client.fence(3)
    network.run()
    assert network.free_pages == [64 - -(-(client.end - 1) // 4)] * 2


def test_higher_epoch_takes_session_over_after_lease() -> None:
    network = ServerNetwork()
    client = opened(network, length=12, new=20)
    whole = client.expected(client.log, 20)
    client.resume(credit=16)
    other = "gateway/2/z"
    network.add_gateway(other)
    adopter = replace(client, gateway=other, base=900, reports=[], tokens=[], fenced={})
    adopter.epoch = Epoch(client.epoch.counter, 2)
    network.tick(31.0)  # the owner was silent for a whole lease
    adopter.refence()
    assert [answer.kv for answer in adopter.fenced.values()] == [len(client.log) - 1] * 2
    old = list(client.own)
    client.refence()
    assert all(answer.unknown for answer in client.fenced.values()), "the handle was its owner's"
    client.epoch = Epoch(adopter.epoch.counter - 1, 1)
    client.refence()  # creates hops at a lower epoch
    assert {answer.refusal for answer in client.fenced.values()} == {Refusal.STALE_EPOCH}
    client.put(0, Close(old[0]))
    adopter.resume()
    assert adopter.log[12:] == whole


@pytest.mark.parametrize("found", ["", "older"])
def test_taken_hop_starts_empty_if_another_epoch_ran(found: str) -> None:
    """A gateway gets no KV and log of a hop whose last epoch it does not know."""
    network = ServerNetwork()
    client = opened(network, length=12, new=20)
    whole = client.expected(client.log, 20)
    client.resume(credit=16)
    other = "gateway/2/z"
    network.add_gateway(other)
    adopter = replace(client, gateway=other, base=900, reports=[], tokens=[], fenced={})
    adopter.epoch = Epoch(client.epoch.counter, 2)
    adopter.last_started = Epoch(client.epoch.counter - 1, 1) if found else None
    network.tick(31.0)
    adopter.refence()
    assert [(each.kv, each.log) for each in adopter.fenced.values()] == [(0, 0)] * 2
    adopter.resume()
    assert adopter.log[12:] == whole


def test_relinquished_hop_keeps_its_log_for_a_takeover() -> None:
    network = ServerNetwork()
    client = opened(network, length=12, new=20)
    whole = client.expected(client.log, 20)
    client.resume(credit=16)
    for index, handle in enumerate(client.own):
        client.put(index, Close(handle, relinquished=True))
    other = "gateway/2/z"
    network.add_gateway(other)
    adopter = replace(client, gateway=other, base=900, reports=[], tokens=[], fenced={})
    adopter.epoch, adopter.last_started = Epoch(client.epoch.counter, 2), client.epoch
    adopter.refence()
    assert [answer.kv for answer in adopter.fenced.values()] == [len(client.log) - 1] * 2
    adopter.resume()
    assert adopter.log[12:] == whole


def test_relinquished_hop_is_freed_after_two_leases() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.resume(credit=16)
    client.put(1, Close(client.own[1], relinquished=True))
    network.run()
    tail = client.hops[1][0]
    lease = tail.core._fencing._peers.lease_seconds(NO_GATEWAY)
    network.tick(1.5 * lease)
    assert tail.core.stats.sessions == 1
    network.tick(2.5 * lease)
    assert (tail.core.stats.sessions, tail.core.stats.free_pages) == (0, 64)


def test_relinquished_hop_that_never_ran_is_freed() -> None:
    network = ServerNetwork()
    client = opened(network)
    tail = client.hops[1][0]
    client.put(1, Close(client.own[1], relinquished=True))
    network.run()
    assert (tail.core.stats.sessions, tail.core.stats.free_pages) == (0, 64)
