"""Faults within an epoch, and state that must end with it (R2, fencing; R7, credit; I7, isolation)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core.scripted_gateway import (
    GATEWAY,
    Client,
    ServerNetwork,
    make_clients,
    opened,
    prompt,
    route,
    start_all,
)

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import (
    FaultKind,
    Fence,
    Input,
    Lane,
    Rows,
    Sampling,
    Token,
    Turn,
    Window,
)
from modelswarm_serving.model.base import Result


def test_failed_step_is_reported_and_fence_recovers_session() -> None:
    network = ServerNetwork()
    client = opened(network)
    expected = client.expected(client.log, 8)
    client.go()
    tail = client.hops[1][0]
    network.run(until=lambda: bool(tail.out))
    tail.out = ()
    tail.core.fail_step("the device fell off the bus", 0.0)
    client.finish()
    assert [report.kind for report in client.reports] == [FaultKind.FAILED]
    client.refence()
    assert [token.token for token in client.resume()] == expected


@pytest.mark.parametrize("culprit", [None, 0, 1, 2])
def test_failed_batch_fails_only_the_poisoned_session(culprit: int | None) -> None:
    network = ServerNetwork()
    servers = route(network, 2)
    clients = make_clients(network, servers, [9, 10, 11])
    expected = [client.expected(client.log, 8) for client in clients]
    start_all(clients, 8)
    tail = servers[1][0]
    network.run(until=lambda: len(tail.out) == 3)
    poison = None if culprit is None else len(clients[culprit].log)
    raised = 0
    while tail.out:
        work, tail.out = tail.out, ()
        if raised == 0 or any(item.count == poison for item in work):
            tail.core.fail_step("poisoned", 0.0)
            raised += 1
        else:
            tail.core.finish_step(tail.model.step(work), 0.0)
        tail.begin_step(0.0)
        assert len(tail.out) <= 1
    for client, wanted in zip(clients, expected, strict=True):
        tokens = [token.token for token in client.finish()]
        if culprit is not None and client is clients[culprit]:
            assert [report.detail for report in client.reports] == ["poisoned"] and not tokens
        else:
            assert tokens == wanted and not client.reports


def test_failed_step_is_repeated_with_no_more_rows() -> None:
    """It may have found no memory for its rows, and more rows need more."""
    network = ServerNetwork()
    servers = route(network, 1, token_budget=64, total_pages=100)
    clients = make_clients(network, servers, [40, 120])
    start_all(clients, 3)
    (server,) = network.servers.values()
    network.deliver_all()
    server.begin_step(0.0)
    assert [item.count for item in server.works] == [40, 24]
    server.out = ()
    server.core.fail_step("out of memory", 0.0)
    for count in (40, 24):
        server.begin_step(0.0)
        assert [item.count for item in server.works] == [count]
        server.end_step(0.0)
    server.begin_step(0.0)
    assert [item.count for item in server.works] == [1, 63]


@pytest.mark.parametrize("hops", [1, 2])
def test_prompt_on_full_device_runs_in_smaller_steps(hops: int) -> None:
    network = ServerNetwork()
    servers = route(network, hops, token_budget=64, total_pages=100)
    (client,) = make_clients(network, servers, [200])
    expected = client.expected(client.log, 8)
    start_all([client], 8)
    failed = 0
    network.deliver_all()
    while [server for server, _, _ in servers if server.begin_step(0.0)]:
        for server, _, _ in servers:
            work, server.out = server.out, ()
            if sum(item.count for item in work) > 20:  # there is no memory for more rows
                server.core.fail_step("out of memory", 0.0, is_full=True)
                failed += 1
            elif work:
                server.core.finish_step(server.model.step(work), 0.0)
        network.deliver_all()
    client.listen()
    assert [token.token for token in client.tokens] == expected
    assert failed and not client.reports


def test_row_without_device_memory_is_reported() -> None:
    network = ServerNetwork()
    (client,) = make_clients(network, route(network, 1), [5])
    start_all([client], 3)
    (server,) = network.servers.values()
    network.deliver_all()
    for count in (5, 2, 1):
        server.begin_step(0.0)
        assert [item.count for item in server.works] == [count]
        server.out = ()
        server.core.fail_step("out of memory", 0.0, is_full=True)
    client.finish()
    assert [report.detail for report in client.reports] == ["out of memory"]


def test_failed_result_fails_only_its_session() -> None:
    network = ServerNetwork()
    servers = route(network, 2)
    clients = make_clients(network, servers, [9] * 3)
    expected = [client.expected(client.log, 8) for client in clients]
    start_all(clients, 8)
    head = servers[0][0]
    network.run(until=lambda: len(head.out) == 3)
    results = head.model.step(head.out)
    head.end_step(0.0, [results[0], Result(error="not a number"), results[2]])
    for client, wanted in zip(clients, expected, strict=True):
        client.finish()
        if client is clients[1]:
            assert [report.detail for report in client.reports] == ["not a number"]
        else:
            assert [token.token for token in client.tokens] == wanted


BAD_GOS: list[dict[str, object]] = [
    {"start": 13},
    {"start": -1},
    {"length": 0},
    {"length": 4000},
    {"predecessor": None},
    {"ring": None},
]


@pytest.mark.parametrize("changes", BAD_GOS)
def test_invalid_start_epoch_is_reported_and_changes_nothing(changes: dict[str, object]) -> None:
    network = ServerNetwork()
    client = opened(network)
    expected = client.expected(client.log, 8)
    client.put(1, replace(client._go_of(1, [0, 0], 100, True), **changes))  # type: ignore[arg-type]
    client.finish()
    assert [report.kind for report in client.reports] == [FaultKind.FAILED]
    client.start(8)
    assert [token.token for token in client.finish()] == expected


def test_start_epoch_for_rows_not_retained_is_a_gap() -> None:
    network = ServerNetwork()
    client = opened(network, replay_bytes=0)
    client.resume(credit=14)
    client.refence()
    go = client._go_of(0, [10, 4], 100, True)
    client.put(0, go)
    client.finish()
    assert [report.kind for report in client.reports] == [FaultKind.GAP]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=float("nan")),
        Sampling(temperature=float("inf")),
        Sampling(top_k=-1),
        Sampling(top_p=1.5),
        Sampling(repetition_penalty=-1.0),
        Sampling(seed=1 << 64),
    ],
)
def test_invalid_sampling_params_are_reported_without_tokens(sampling: Sampling) -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(5), sampling=sampling)
    client.start(5)
    assert not client.finish()
    assert FaultKind.FAILED in {report.kind for report in client.reports}


def test_start_epoch_before_truncation_is_ignored() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.go()
    tail = client.hops[1][0]
    network.run(until=lambda: bool(tail.out))
    client.fence()
    tail.core.receive(GATEWAY, network.lanes[GATEWAY, tail.peer, Lane.LIVE].pop(), 0.0)
    tail.core.receive(GATEWAY, replace(client._go_of(1, [0, 0], 99, True), start=0), 0.0)
    tail.end_step(0.0)
    assert tail.core.stats.running == 0
    client.finish()
    expected = client.expected(client.log, client.end - len(client.log))
    assert [token.token for token in client.resume()] == expected
    assert not client.reports


def test_row_held_for_live_lane_is_dropped_with_its_epoch() -> None:
    network = ServerNetwork()
    client = opened(network, length=10)
    client.go()
    head, tail = (hop[0] for hop in client.hops)
    bulk = (head.peer, tail.peer, Lane.BULK)
    network.run(until=lambda: bulk in network.lanes)
    network.lanes.pop(bulk)
    network.run()  # row 9 is held: rows 0 to 8 were never acknowledged
    client.log = [*client.log[:6], *prompt(4, seed=5)]
    expected = client.expected(client.log, 8)
    client.refence(8, kv_cut=6, log_cut=6)
    assert [token.token for token in client.resume()] == expected
    assert not client.reports
    live = [send for send in network.sent(Rows) if send.lane is Lane.LIVE]
    assert len(live) == 8


def test_windows_of_previous_epoch_are_not_used() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2, row_window=10), prompt(40))
    client.start(8)
    client.finish()
    client.log = prompt(40, seed=2)
    expected = client.expected(client.log, 8)
    client.refence(8, kv_cut=0, log_cut=0)
    assert [token.token for token in client.resume()] == expected
    assert not client.reports


def test_credit_before_start_epoch_is_used() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.raise_credit(15)
    network.run()
    assert [token.position for token in client.resume(credit=13)] == [12, 13, 14, 15]
    forged = Window(client.own[1], client.epoch, 0, 99)
    network.put("gateway/3/x", client.hops[1][0].peer, forged)
    assert len(client.finish()) == 4


def test_hop_that_lost_its_link_sends_nothing() -> None:
    network = ServerNetwork()
    client = opened(network, hops=3)
    client.go()
    middle, tail = client.hops[1][0], client.hops[2][0]
    network.run(until=lambda: bool(middle.out))
    network.cut_link(middle.peer, tail.peer)
    seen = len(network.record)
    middle.end_step(0.0)
    network.collect()
    assert not [send for name, send in network.record[seen:] if name == middle.peer]
    client.refence()
    assert client.fenced[1].kv == 11  # the KV of that step is valid


def test_turn_with_smaller_reserve_keeps_existing_kv() -> None:
    network = ServerNetwork()
    client = opened(network, length=20)
    client.resume(credit=22)
    for index in (0, 1):
        fence = Fence(client.own[index], 100 + index, Epoch(9, 1), 19, 20, turn=Turn(2, 3))
        client.put(index, fence)
    network.run()
    assert network.free_pages == [64 - 5] * 2
    client.epoch = Epoch(9, 1)
    client.log = client.log[:20]
    expected = client.expected(client.log, 8)
    client.start(8)
    assert [token.token for token in client.finish()] == expected


def test_input_during_step_does_not_change_borrowed_log() -> None:
    network = ServerNetwork()
    client = opened(network)
    client.go()
    tail = client.hops[1][0]
    network.run(until=lambda: bool(tail.works and tail.works[0].sample))
    pick = tail.works[0].sample
    assert pick is not None
    more = Input(client.own[1], client.epoch, 12, (1, 2))
    tail.core.receive(GATEWAY, more, 0.0)
    assert len(pick.log) == pick.position == 12


def test_head_ignores_token_after_the_last_one() -> None:
    network = ServerNetwork()
    client = opened(network, new=3)
    client.resume()
    head, tail = client.hops[0][0], client.hops[1][0]
    after = Token(client.own[0], client.epoch, 15, 1)
    network.put(tail.peer, head.peer, after)
    client.finish()
    assert not client.reports
    client.refence(log_cut=99)
    assert client.fenced[0].log == 15
