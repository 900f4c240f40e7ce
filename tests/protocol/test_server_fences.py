"""Fence and Go: the only cut and the only open, what they freeze, and recovery by them (R2-R6, R8)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from protocol.server_pump import GATEWAY, Client, Pump, prompt, route, start_all

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import (
    Close,
    Create,
    Fence,
    Fenced,
    Go,
    Input,
    Item,
    Lane,
    Refusal,
    Role,
    Rows,
    Sampling,
    Token,
    Trouble,
    Turn,
    Window,
)
from modelswarm_serving.model.base import Result


def opened(pump: Pump, hops: int = 2, length: int = 12, new: int = 8) -> Client:
    client = Client(pump, route(pump, hops), prompt(length))
    client.fence(new)
    pump.run()
    client.listen()
    return client


def again(pump: Pump, client: Client, kind: type[Item]) -> None:
    """Every message of a kind that the gateway has put on a lane, once more behind all others."""
    for (sender, to, _), items in list(pump.lanes.items()):
        for item in list(items):
            if isinstance(item, kind) and sender == client.gateway:
                pump.put(sender, to, item)


def test_a_fence_asked_again_before_go_gives_the_same_answer() -> None:
    pump = Pump()
    client = Client(pump, route(pump, 2), prompt(12))
    client.fence(8)
    again(pump, client, Fence)
    pump.run()
    answers = [item for _, item in pump.answers]
    assert len(answers) == 4 and answers[0] in answers[1:] and len(set(map(repr, answers))) == 2
    assert [server.core.stats.sessions for server in pump.servers.values()] == [1, 1]


def test_a_fence_that_comes_again_after_go_cuts_nothing() -> None:
    pump = Pump()
    client = Client(pump, route(pump, 2), prompt(12))
    expected = client.expected(client.log, 8)
    client.fence(8)
    fences = {key: list(items) for key, items in pump.lanes.items()}
    pump.run()
    client.listen()
    gos = client.go()
    again(pump, client, Go)
    for _ in range(30):
        pump.run(12)
        for (sender, to, lane), items in fences.items():
            for item in items:
                pump.put(sender, to, item, lane)
        for index, go in enumerate(gos):
            client.put(index, go)
    assert [token.token for token in client.finish()] == expected
    assert len([item for _, item in pump.answers if isinstance(item, Fenced)]) == 2
    assert not client.reports
    assert [server.core.stats.rows for server in pump.servers.values()] == [12 + 7] * 2


def test_a_lower_epoch_is_ignored_and_an_unknown_handle_is_named() -> None:
    pump = Pump()
    client = opened(pump)
    server = client.hops[0][0]
    before = len(pump.answers)
    client.put(0, Fence(client.own[0], 7, Epoch(0, 9), 0, 0))
    pump.run()
    assert len(pump.answers) == before
    client.put(0, Fence(12345, 7, Epoch(0, 9), 0, 0))
    pump.run()
    answer = pump.answers[-1][1]
    assert isinstance(answer, Fenced)
    assert (answer.handle, answer.own, answer.epoch, answer.unknown) == (7, 0, Epoch(0, 9), True)
    assert server.core.stats.sessions == 1


def test_a_create_is_one_hop_per_session_and_block_range() -> None:
    pump = Pump()
    whole = pump.serve(0, 6)
    name = whole.address.peer
    turn = Turn(10, 11)
    for reply, (first, last) in enumerate([(0, 3), (3, 6), (0, 3)], start=1):
        create = Create("a", first, last)
        pump.put(GATEWAY, name, Fence(0, reply, Epoch(1, 1), 0, 0, create, turn))
    pump.run()
    first_, second, third = (item for _, item in pump.answers)
    assert isinstance(first_, Fenced) and isinstance(second, Fenced) and isinstance(third, Fenced)
    assert third == replace(first_, handle=3)  # the gateway has given the hop another name
    assert second.own not in (0, first_.own)
    assert whole.core.stats.sessions == 2


def test_counters_freeze_at_the_first_fence_after_a_go() -> None:
    pump = Pump()
    client = opened(pump, hops=3)
    assert [answer.counters for answer in client.fenced.values()] == [None] * 3
    client.go(credit=15)
    ran = client.epoch
    client.finish()
    for _ in range(3):  # also by fences that follow without a Go
        client.fence()
        pump.run()
        client.listen()
        head, middle, tail = (client.fenced[at].counters for at in range(3))
        assert head and middle and tail
        assert head.epoch == middle.epoch == tail.epoch == ran
        assert head.sent == middle.received == 15
        assert middle.sent == tail.received == 15
        assert head.window == middle.granted == middle.window == tail.granted == 19
        assert tail.tokens_sent == head.tokens_received == 15


def test_counters_show_the_link_that_lost_rows() -> None:
    pump = Pump()
    client = opened(pump, hops=3)
    client.go()
    one, two = client.hops[1][0].address.peer, client.hops[2][0].address.peer
    while not pump.lanes.get((one, two, Lane.BULK)):
        pump.run(1)
    pump.lanes.pop((one, two, Lane.BULK))
    pump.run()
    client.fence()
    pump.run()
    client.listen()
    head, middle, tail = (client.fenced[at].counters for at in range(3))
    assert head and middle and tail
    assert head.sent <= middle.received and middle.sent > tail.received


def test_an_input_that_is_late_does_not_blame_the_ring() -> None:
    pump = Pump()
    client = opened(pump)
    client.go()
    pump.lanes.pop((GATEWAY, client.hops[0][0].address.peer, Lane.BULK))
    pump.run()
    client.fence()
    pump.run()
    client.listen()
    head, tail = client.fenced[0].counters, client.fenced[1].counters
    assert head and tail and head.tokens_received >= tail.tokens_sent


def test_a_fence_stops_sending_at_once_and_cuts_when_the_step_retires() -> None:
    pump = Pump()
    client = opened(pump)
    client.go()
    tail = client.hops[1][0]
    while not tail.out:
        pump.run(1)
    before = len(pump.answers)
    client.fence(kv_cut=5, log_cut=6)
    tail.core.receive(GATEWAY, pump.lanes[GATEWAY, tail.address.peer, Lane.LIVE].pop(), 0.0)
    pump.collect()
    assert len(pump.answers) == before  # not while the step is out
    tail.retire(0.0)
    pump.collect()
    (answer,) = (item for _, item in pump.answers[before:])
    assert isinstance(answer, Fenced)
    assert (answer.kv, answer.log, answer.epoch) == (5, 6, client.epoch)


def test_fences_that_follow_each_other_during_a_step_make_one_lowest_cut() -> None:
    pump = Pump()
    client = opened(pump, length=20)
    client.go()
    tail = client.hops[1][0]
    while not tail.out:
        pump.run(1)
    fence = Fence(client.own[1], 101, Epoch(2, 1), 4, 5, turn=Turn(90, 91, Sampling(seed=5)))
    tail.core.receive(GATEWAY, fence, 0.0)
    tail.core.receive(
        GATEWAY, replace(fence, epoch=Epoch(3, 1), kv_cut=9, log_cut=9, turn=None), 0.0
    )
    tail.core.receive(GATEWAY, fence, 0.0)
    pump.collect()
    before = len(pump.answers)
    tail.retire(0.0)
    pump.collect()
    (answer,) = (item for _, item in pump.answers[before:])
    assert isinstance(answer, Fenced)
    assert (answer.kv, answer.log, answer.epoch) == (4, 5, Epoch(3, 1))
    assert answer.free_pages == 64 - 23


def test_a_hop_closed_during_a_step_gives_its_pages_when_it_retires() -> None:
    pump = Pump()
    client = opened(pump)
    client.go()
    tail = client.hops[1][0]
    while not tail.out:
        pump.run(1)
    tail.core.receive(GATEWAY, Close(client.own[1]), 0.0)
    assert tail.core.stats.sessions == 0 and tail.core.stats.free_pages < 64
    create = Create("a", 3, 6)  # the same range again, while the old one's step is out
    tail.core.receive(GATEWAY, Fence(0, 300, Epoch(1, 1), 0, 0, create, Turn(10, 11)), 0.0)
    tail.retire(0.0)
    assert tail.core.stats.free_pages == 64 - 3
    pump.collect()
    answer = pump.answers[-1][1]
    assert isinstance(answer, Fenced) and answer.own not in (0, client.own[1])


def test_a_lower_start_cuts_the_kv_and_the_rows_are_run_again() -> None:
    pump = Pump()
    client = opened(pump, hops=3, length=30)
    client.go(credit=35)
    client.finish()
    spare = pump.serve(2, 4)
    client.replace_hop(1, spare)
    client.fence(repair=True)
    pump.run()
    client.listen()
    length = len(client.log)
    assert [client.fenced[at].kv for at in range(3)] == [length - 1, 0, length - 1]
    expected = client.expected(client.log, client.end - length)
    gos = client.go()
    # no kept rows: the head starts again from its tokens, the tail keeps its KV and gets nothing below
    assert [go.start for go in gos] == [0, 0, length - 1]
    assert gos[1].send_from == length - 1
    assert [token.token for token in client.finish()] == expected
    assert client.hops[2][0].core.stats.rows < 60


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("seed", range(12))
def test_a_lost_server_at_any_moment_costs_no_token(hops: int, seed: int) -> None:
    pump = Pump(seed=seed)
    client = opened(pump, hops=hops, length=25, new=30)
    whole = client.expected(client.log, 30)
    client.go()
    for _ in range(3):
        pump.run(pump.random.randrange(5, 60))
        client.listen()
        lost = pump.random.randrange(hops)
        server, first, last = client.hops[lost]
        pump.dead.add(server.address.peer)
        for name in list(pump.servers):
            if name != server.address.peer:
                pump.cut_link(server.address.peer, name)
        client.replace_hop(lost, pump.serve(first, last))
        client.fence(repair=True)
        while len(client.fenced) < hops:
            pump.run(1)
            client.listen()
        client.go()
    client.finish()
    assert client.log[25:] == whole


@pytest.mark.parametrize("seed", range(20))
def test_a_broken_link_between_two_servers_costs_no_token(seed: int) -> None:
    pump = Pump(seed=seed)
    client = opened(pump, hops=3, length=40, new=30)
    whole = client.expected(client.log, 30)
    client.go()
    for _ in range(4):
        pump.run(pump.random.randrange(5, 60))
        one, two = pump.random.sample([hop[0].address.peer for hop in client.hops], 2)
        pump.cut_link(one, two)
        client.listen()
        for report in client.reports:
            assert report.trouble is Trouble.LINK_DOWN and report.generation > 0
        client.fence()
        while len(client.fenced) < 3:
            pump.run(1)
            client.listen()
        client.go()
    client.finish()
    assert client.log[40:] == whole


def test_a_broken_link_is_reported_once_by_both_ends_with_its_generation() -> None:
    pump = Pump()
    client = opened(pump, hops=3)
    for generation in (1, 2):
        client.go(credit=15)
        client.finish()
        one, two = (client.hops[at][0].address.peer for at in (0, 1))
        client.reports.clear()
        pump.cut_link(one, two)
        client.finish()
        assert {(report.peer, report.generation) for report in client.reports} == {
            (one, generation),
            (two, generation),
        }
        pump.servers[one].core.disconnected(two, 0.0)  # nothing runs any more: nothing to say
        pump.servers[two].core.disconnected(one, 0.0)
        pump.servers[one].core._peers._broken[two] = generation
        pump.servers[two].core._peers._broken[one] = generation
        client.fence()
        pump.run()
        client.listen()
        assert len(client.reports) == 2


def test_a_refused_turn_keeps_cut_epoch_and_old_reserve() -> None:
    pump = Pump()
    client = opened(pump, length=12, new=8)
    client.go()
    client.finish()
    free = pump.free_pages
    client.fence(1000, kv_cut=6, log_cut=6)
    pump.run()
    client.listen()
    for answer in client.fenced.values():
        assert (answer.refused, answer.kv, answer.epoch) == (Refusal.TOO_LONG, 6, client.epoch)
        assert answer.own != 0
    assert pump.free_pages == free
    client.log = [*client.log[:6], *prompt(4, seed=8)]
    expected = client.expected(client.log, 5)
    client.start(5)
    assert [token.token for token in client.finish()] == expected


def test_a_turn_that_finds_no_free_page_is_refused_until_there_is_room() -> None:
    pump = Pump()
    servers = route(pump, 2, pages=20)
    one = Client(pump, servers, prompt(8), session="one")
    two = Client(pump, servers, prompt(8), session="two", base=200)
    start_all([one, two], 8)  # 4 pages each of 18
    assert len(one.finish()) == len(two.finish()) == 8
    one.fence(48)  # 16 pages in all
    pump.run()
    one.listen()
    assert {answer.refused for answer in one.fenced.values()} == {Refusal.NO_PAGES}
    two.close()
    expected = one.expected(one.log, 48)
    one.start(48)
    assert [token.token for token in one.finish()] == expected


def test_a_smaller_turn_gives_pages_back() -> None:
    pump = Pump()
    client = opened(pump, length=12, new=100)
    client.go(credit=14)
    client.finish()
    client.fence(3)
    pump.run()
    assert pump.free_pages == [64 - -(-(client.end - 1) // 4)] * 2


def test_another_gateway_with_a_higher_epoch_takes_the_session_over() -> None:
    pump = Pump()
    client = opened(pump, length=12, new=20)
    whole = client.expected(client.log, 20)
    client.go(credit=16)
    client.finish()
    other = "gateway/2/z"
    for server in pump.servers.values():
        server.core.connected(other, Role.GATEWAY, 0.0)
    adopter = replace(client, gateway=other, base=900, reports=[], tokens=[], fenced={})
    adopter.epoch = Epoch(client.epoch.counter, 2)
    adopter.fence()
    client.fence()  # the first one asks too, with a lower epoch, and is not heard
    adopter.epoch = Epoch(client.epoch.counter, 2)
    pump.run()
    adopter.listen()
    client.put(0, Close(client.own[0]))
    adopter.go()
    adopter.finish()
    assert adopter.log[12:] == whole


def test_a_failed_step_is_reported_and_the_session_goes_on_after_a_fence() -> None:
    pump = Pump()
    client = opened(pump)
    expected = client.expected(client.log, 8)
    client.go()
    tail = client.hops[1][0]
    while not tail.out:
        pump.run(1)
    tail.out = ()
    tail.core.fail_step("the device fell off the bus", 0.0)
    client.finish()
    assert [report.trouble for report in client.reports] == [Trouble.FAILED]
    client.fence()
    pump.run()
    client.listen()
    client.go()
    assert [token.token for token in client.finish()] == expected


@pytest.mark.parametrize("culprit", [None, 0, 1, 2])
def test_a_step_that_raises_stops_only_the_session_that_makes_it_raise(culprit: int | None) -> None:
    pump = Pump()
    servers = route(pump, 2)
    clients = [
        Client(pump, servers, prompt(9 + at, at), session=f"s{at}", base=100 * (at + 1))
        for at in range(3)
    ]
    expected = [client.expected(client.log, 8) for client in clients]
    start_all(clients, 8)
    tail = servers[1][0]
    while len(tail.out) < 3:
        pump.run(1)
    poison = None if culprit is None else len(clients[culprit].log)
    raised = 0
    while tail.out:
        work, tail.out = tail.out, ()
        if raised == 0 or any(item.count == poison for item in work):
            tail.core.fail_step("poisoned", 0.0)
            raised += 1
        else:
            tail.core.finish_step(tail.model.step(work), 0.0)
        tail.plan(0.0)
        assert len(tail.out) <= 1
    for client, wanted in zip(clients, expected, strict=True):
        tokens = [token.token for token in client.finish()]
        if culprit is not None and client is clients[culprit]:
            assert [report.detail for report in client.reports] == ["poisoned"] and not tokens
        else:
            assert tokens == wanted and not client.reports


def test_one_failed_result_stops_one_session_only() -> None:
    pump = Pump()
    servers = route(pump, 2)
    clients = [
        Client(pump, servers, prompt(9, at), session=f"s{at}", base=100 * (at + 1))
        for at in range(3)
    ]
    expected = [client.expected(client.log, 8) for client in clients]
    start_all(clients, 8)
    head = servers[0][0]
    while len(head.out) < 3:
        pump.run(1)
    results = head.model.step(head.out)
    head.retire(0.0, [results[0], Result(error="not a number"), results[2]])
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
def test_a_go_that_does_not_fit_is_reported_and_harms_nothing(changes: dict[str, object]) -> None:
    pump = Pump()
    client = opened(pump)
    expected = client.expected(client.log, 8)
    client.put(1, replace(client._go_of(1, [0, 0], 100, True), **changes))  # type: ignore[arg-type]
    client.finish()
    assert [report.trouble for report in client.reports] == [Trouble.FAILED]
    client.start(8)
    assert [token.token for token in client.finish()] == expected


def test_a_go_that_wants_rows_nobody_kept_is_a_gap() -> None:
    pump = Pump()
    client = opened(pump)
    client.go(credit=14)
    client.finish()
    client.fence()
    pump.run()
    client.listen()
    go = client._go_of(0, [10, 4], 100, True)
    client.put(0, go)
    client.finish()
    assert [report.trouble for report in client.reports] == [Trouble.GAP]


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
def test_params_that_no_sampler_can_take_are_reported_and_reach_no_step(sampling: Sampling) -> None:
    pump = Pump()
    client = Client(pump, route(pump, 2), prompt(5), sampling=sampling)
    client.start(5)
    assert not client.finish()
    assert Trouble.FAILED in {report.trouble for report in client.reports}


def test_a_go_before_the_cut_was_made_is_ignored() -> None:
    pump = Pump()
    client = opened(pump)
    client.go()
    tail = client.hops[1][0]
    while not tail.out:
        pump.run(1)
    client.fence()
    tail.core.receive(GATEWAY, pump.lanes[GATEWAY, tail.address.peer, Lane.LIVE].pop(), 0.0)
    tail.core.receive(GATEWAY, replace(client._go_of(1, [0, 0], 99, True), start=0), 0.0)
    tail.retire(0.0)
    assert tail.core.stats.running == 0
    client.finish()
    expected = client.expected(client.log, client.end - len(client.log))
    client.go()
    assert [token.token for token in client.finish()] == expected
    assert not client.reports


def test_a_row_that_waited_for_its_lane_dies_with_its_epoch() -> None:
    pump = Pump()
    client = opened(pump, length=10)
    client.go()
    head, tail = (hop[0] for hop in client.hops)
    bulk = (head.address.peer, tail.address.peer, Lane.BULK)
    while not pump.lanes.get(bulk):
        pump.run(1)
    pump.lanes.pop(bulk)
    pump.run()  # row 9 is computed and held: rows 0 to 8 were never acknowledged
    client.log = [*client.log[:6], *prompt(4, seed=5)]
    expected = client.expected(client.log, 8)
    client.fence(8, kv_cut=6, log_cut=6)
    pump.run()
    client.listen()
    client.go()
    assert [token.token for token in client.finish()] == expected
    assert not client.reports
    live = [send for send in pump.sent(Rows) if send.lane is Lane.LIVE]
    assert len(live) == 8


def test_windows_of_the_epoch_before_do_not_hold() -> None:
    pump = Pump()
    client = Client(pump, route(pump, 2, row_window=10), prompt(40))
    client.start(8)
    client.finish()
    client.log = prompt(40, seed=2)
    expected = client.expected(client.log, 8)
    client.fence(8, kv_cut=0, log_cut=0)
    pump.run()
    client.listen()
    client.go()
    assert [token.token for token in client.finish()] == expected
    assert not client.reports


def test_credit_that_came_before_go_holds() -> None:
    pump = Pump()
    client = opened(pump)
    client.raise_credit(15)
    pump.run()
    client.go(credit=13)
    assert [token.position for token in client.finish()] == [12, 13, 14, 15]
    forged = Window(client.own[1], client.epoch, 0, 99)
    pump.put("gateway/3/x", client.hops[1][0].address.peer, forged)
    assert len(client.finish()) == 4


def test_a_hop_that_lost_its_link_sends_nothing_more() -> None:
    pump = Pump()
    client = opened(pump, hops=3)
    client.go()
    middle, tail = client.hops[1][0], client.hops[2][0]
    while not middle.out:
        pump.run(1)
    pump.cut_link(middle.address.peer, tail.address.peer)
    seen = len(pump.seen)
    middle.retire(0.0)
    pump.collect()
    assert not [send for name, send in pump.seen[seen:] if name == middle.address.peer]
    client.fence()
    pump.run()
    client.listen()
    assert client.fenced[1].kv == 11  # what the step computed is good all the same


def test_a_turn_that_reserves_less_than_there_is_keeps_the_kv_it_has() -> None:
    pump = Pump()
    client = opened(pump, length=20)
    client.go(credit=22)
    client.finish()
    for index in (0, 1):
        fence = Fence(client.own[index], 100 + index, Epoch(9, 1), 19, 20, turn=Turn(2, 3))
        client.put(index, fence)
    pump.run()
    assert pump.free_pages == [64 - 5] * 2
    client.epoch = Epoch(9, 1)
    client.log = client.log[:20]
    expected = client.expected(client.log, 8)
    client.start(8)
    assert [token.token for token in client.finish()] == expected


def test_an_input_during_a_step_leaves_the_borrowed_log_alone() -> None:
    pump = Pump()
    client = opened(pump)
    client.go()
    tail = client.hops[1][0]
    while not (tail.out and tail.out[0].pick):
        pump.run(1)
    pick = tail.out[0].pick
    assert pick is not None
    more = Input(client.own[1], client.epoch, 12, (1, 2))
    tail.core.receive(GATEWAY, more, 0.0)
    assert len(pick.log) == pick.position == 12


def test_the_head_takes_nothing_after_the_last_token() -> None:
    pump = Pump()
    client = opened(pump, new=3)
    client.go()
    client.finish()
    head, tail = client.hops[0][0], client.hops[1][0]
    after = Token(client.own[0], client.epoch, 15, 1)
    pump.put(tail.address.peer, head.address.peer, after)
    client.finish()
    assert not client.reports
    client.fence(log_cut=99)
    pump.run()
    client.listen()
    assert client.fenced[0].log == 15
