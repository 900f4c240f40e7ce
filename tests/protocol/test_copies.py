"""A hop is copied to another server while it serves (R13, the servers' half), on the hash model."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from protocol.server_pump import GATEWAY, Client, Pump, Server, opened

from modelswarm.protocol.identity import Handle
from modelswarm.protocol.messages import (
    Copy,
    Create,
    Fence,
    Fenced,
    Go,
    Input,
    Lane,
    Neighbour,
    Report,
    Rows,
    Token,
    Trouble,
    Turn,
    Window,
)
from modelswarm_serving.core.copies import STEP_BYTES
from modelswarm_serving.model.base import KvRead, KvWrite, Result, Work

CONTEXT, NEW, READ = 60, 40, 20
WARM_REPLY = 900


@dataclass
class Spare:
    """A new hop beside the route, as the gateway that orders the copy sees it."""

    client: Client
    hop: int
    server: Server
    own: Handle
    fed: int = 0

    @property
    def told(self) -> list[int]:
        """KV that it said it has."""
        return [
            item.received
            for _, item in self.client.pump.answers
            if isinstance(item, Window) and item.handle == WARM_REPLY
        ]

    @property
    def reports(self) -> list[Report]:
        return [
            item
            for _, item in self.client.pump.answers
            if isinstance(item, Report) and item.handle == WARM_REPLY
        ]

    @property
    def kv(self) -> int:
        return max(self.told, default=0)

    def feed(self) -> None:
        """A new head and a new tail store the log."""
        if self.hop in (0, len(self.client.hops) - 1):
            body = Input(self.own, self.client.epoch, self.fed, tuple(self.client.log[self.fed :]))
            self.client.pump.put(GATEWAY, self.server.address.peer, body)
            self.fed = len(self.client.log)

    def switch(self) -> None:
        _, first, last = self.client.hops[self.hop]
        self.client.hops[self.hop] = (self.server, first, last)
        self.client.own[self.hop] = self.own


def running(pump: Pump, hops: int = 3, **settings: int) -> Client:
    client = opened(pump, hops=hops, length=CONTEXT, new=NEW, **settings)
    client.go(credit=CONTEXT + READ)
    client.finish()
    return client


def opened_beside(client: Client, hop: int, **settings: int) -> Spare:
    _, first, last = client.hops[hop]
    pump = client.pump
    server = pump.serve(first, last, **settings)
    create = Create(client.session, first, last, repair=True)
    turn = Turn(client.end - 1, client.end, client.sampling)
    fence = Fence(0, WARM_REPLY, client.epoch, 0, 0, create, turn)
    pump.put(GATEWAY, server.address.peer, fence)
    pump.run()
    own = [i.own for _, i in pump.answers if isinstance(i, Fenced) and i.handle == WARM_REPLY]
    return Spare(client, hop, server, own[-1])


def warm(spare: Spare, **changes: object) -> None:
    client, hop = spare.client, spare.hop
    go = Go(
        handle=spare.own,
        epoch=client.epoch,
        length=len(client.log),
        start=0,
        send_from=client.end,
        predecessor=client.neighbour(hop),
        successor=None,
        ring=None,
        credit=0,
        hops=len(client.hops),
        warm=True,
    )
    client.pump.put(GATEWAY, spare.server.address.peer, replace(go, **changes))  # type: ignore[arg-type]


def order(spare: Spare, start: int = 0) -> None:
    to = Neighbour(spare.server.address, spare.own)
    client, hop = spare.client, spare.hop
    _, first, last = client.hops[hop]
    client.put(hop, Copy(client.own[hop], client.epoch, to, start, first, last))


@pytest.mark.parametrize("hop", [0, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_a_hop_is_copied_while_it_serves_and_the_session_moves_without_running_a_row_twice(
    hop: int, seed: int
) -> None:
    pump = Pump(seed=seed)
    client = running(pump, row_window=8, token_budget=8)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare = opened_beside(client, hop, row_window=8, token_budget=8)
    warm(spare)
    order(spare)
    spare.feed()
    client.raise_credit(CONTEXT + READ + 10)  # it goes on meanwhile
    done = len(client.log)
    for _ in range(300):
        pump.run(3)
        client.listen()
        spare.feed()
    client.finish()
    assert [token.token for token in client.tokens][READ + 1 :] == rest[: len(client.log) - done]
    assert len(client.log) > done and not client.reports and not spare.reports
    assert spare.kv >= len(client.log) - 1 and not spare.server.core.stats.rows
    after = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare.switch()
    client.fence()
    pump.run()
    client.listen()
    assert client.fenced[hop].kv == len(client.log) - 1 and client.fenced[hop].counters is None
    before = [server.core.stats.rows for server, _, _ in client.hops]
    client.go()
    assert [token.token for token in client.finish()] == after
    ran = [
        server.core.stats.rows - b for (server, _, _), b in zip(client.hops, before, strict=True)
    ]
    assert ran == [len(after)] * 3


def test_a_warm_hop_says_nothing_but_windows() -> None:
    pump = Pump()
    client = running(pump)
    for hop in (1, 2):
        spare = opened_beside(client, hop)
        warm(spare)
        order(spare)
        spare.feed()
        pump.run()
        sent = {type(s.item) for name, s in pump.seen if name == spare.server.address.peer}
        assert sent == {Fenced, Window}
        assert spare.kv == len(client.log) - 1
    assert not [i for _, i in pump.answers if isinstance(i, Token) and i.handle == WARM_REPLY]


def test_rows_of_a_copy_go_on_bulk_and_are_marked_to_be_stored_only() -> None:
    pump = Pump()
    client = running(pump)
    spare = opened_beside(client, 2)
    warm(spare)
    order(spare)
    del pump.seen[:]
    pump.run()
    rows = [send for send in pump.sent(Rows) if send.to.peer == spare.server.address.peer]
    assert rows and all(send.lane is Lane.BULK for send in rows)
    assert all(isinstance(send.item, Rows) and send.item.store_only for send in rows)


def test_rows_that_are_to_be_stored_only_are_no_rows_of_a_route() -> None:
    pump = Pump()
    client = running(pump)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    middle = client.hops[1][0]
    at = len(client.log) - 1
    stray = Rows(client.own[1], client.epoch, at, 1, bytes(8), store_only=True)
    pump.put(client.hops[0][0].address.peer, middle.address.peer, stray)
    client.raise_credit(1000)
    client.finish()
    assert [token.token for token in client.tokens][READ + 1 :] == rest and not client.reports


def kept(server: Server) -> int:
    return server.core.stats.replay_bytes


def test_a_copy_answers_for_the_rows_that_the_hop_had_kept_and_needs_none() -> None:
    for replay_bytes in (0, 1 << 20):
        pump = Pump()
        client = running(pump, replay_bytes=replay_bytes)
        spare = opened_beside(client, 1)
        warm(spare)
        order(spare)
        pump.run()
        assert spare.kv == len(client.log) - 1 and not spare.reports and not client.reports
        assert (kept(spare.server) > 0) == (replay_bytes > 0)
        assert bool(kept(client.hops[1][0])) == bool(kept(spare.server))


def test_a_broken_read_ends_the_copy_and_not_the_session() -> None:
    pump = Pump()
    client = running(pump)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare = opened_beside(client, 1)
    warm(spare)
    order(spare)
    old = client.hops[1][0]
    while not any(isinstance(task, KvRead) for task in old.out):
        pump.run(1)
    old.retire(pump.now, [Result(error="the device is lost")] * len(old.out))
    pump.run()
    client.listen()
    assert [(report.trouble, report.peer) for report in client.reports] == [
        (Trouble.FAILED, spare.server.address.peer)
    ]
    client.raise_credit(1000)
    client.finish()
    assert [token.token for token in client.tokens][READ + 1 :] == rest


def test_a_broken_link_ends_the_copy_and_not_the_session() -> None:
    pump = Pump()
    client = running(pump)
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    spare = opened_beside(client, 1)
    warm(spare)
    order(spare)
    pump.run()
    pump.cut_link(client.hops[1][0].address.peer, spare.server.address.peer)
    client.raise_credit(1000)
    client.finish()
    assert [(report.trouble, report.peer) for report in client.reports] == [
        (Trouble.LINK_DOWN, spare.server.address.peer)
    ]
    assert [report.trouble for report in spare.reports] == [Trouble.LINK_DOWN]
    assert [token.token for token in client.tokens][READ + 1 :] == rest


def test_a_copy_that_is_called_off_sends_no_more_rows() -> None:
    pump = Pump()
    client = running(pump)
    spare = opened_beside(client, 2)
    warm(spare)
    order(spare)
    pump.run()
    client.put(2, Copy(client.own[2], client.epoch, None))
    pump.run()
    had = spare.kv
    client.raise_credit(1000)
    client.finish()
    assert 0 < spare.kv == had < len(client.log) - 1 and not client.reports


@pytest.mark.parametrize("seed", range(8))
def test_a_second_copy_to_the_same_server_is_not_confused_by_the_windows_of_the_first(
    seed: int,
) -> None:
    pump = Pump(seed=seed)
    client = running(pump, row_window=4)
    spare = opened_beside(client, 1, row_window=4)
    warm(spare)
    order(spare)
    pump.run(pump.random.randrange(200))
    other = opened_beside(client, 2, row_window=4)  # elsewhere, so that the next is a new name
    del pump.servers[other.server.address.peer]
    create = Create(client.session, 2, 4, repair=True)
    turn = Turn(client.end - 1, client.end, client.sampling)
    peer = spare.server.address.peer
    spare.server.core._life.free(spare.server.core._life.hops.get(spare.own))  # type: ignore[arg-type]
    pump.put(GATEWAY, peer, Fence(0, WARM_REPLY, client.epoch, 0, 0, create, turn))
    pump.run()
    spare.own = [i.own for n, i in pump.answers if isinstance(i, Fenced) and n == peer][-1]
    warm(spare)
    order(spare)
    pump.run()
    assert not spare.reports and not client.reports
    assert spare.kv == len(client.log) - 1


def test_entries_that_outrun_the_go_of_a_warm_tail_are_kept() -> None:
    pump = Pump()
    client = running(pump)
    spare = opened_beside(client, 2)
    length = len(client.log)
    client.raise_credit(CONTEXT + READ + 5)
    client.finish()
    spare.feed()
    pump.run()
    warm(spare, length=length)
    order(spare)
    pump.run()
    assert spare.kv == len(client.log) - 1
    client.raise_credit(1000)
    client.finish()
    spare.feed()
    pump.run()
    assert not spare.reports and spare.kv == len(client.log) - 1


def test_each_hop_of_a_chain_copies_its_part_of_the_blocks() -> None:
    pump = Pump(n_blocks=6)
    client = running(pump, hops=2)  # blocks 0:3 and 3:6; the second becomes 3:5 and 5:6
    servers = [pump.serve(3, 5), pump.serve(5, 6)]
    owns: list[int] = []
    turn = Turn(client.end - 1, client.end, client.sampling)
    for server, (first, last) in zip(servers, [(3, 5), (5, 6)], strict=True):
        create = Create(client.session, first, last, repair=True)
        fence = Fence(0, WARM_REPLY, client.epoch, 0, 0, create, turn)
        pump.put(GATEWAY, server.address.peer, fence)
        pump.run()
        owns += [
            i.own for n, i in pump.answers if n == server.address.peer and isinstance(i, Fenced)
        ]
    chain = [Neighbour(s.address, own) for s, own in zip(servers, owns, strict=True)]
    for hop, server, blocks in zip(chain, servers, [(3, 5), (5, 6)], strict=True):
        spare = Spare(client, 1, server, hop.handle)
        warm(spare)
        spare.feed()
        client.put(1, Copy(client.own[1], client.epoch, hop, 0, *blocks))
    pump.run()
    rest = client.expected(client.log, NEW - len(client.log) + CONTEXT)
    client.hops[1:] = [(servers[0], 3, 5), (servers[1], 5, 6)]
    client.own[1:] = owns
    client.fence()
    pump.run()
    client.listen()
    assert [fenced.kv for fenced in client.fenced.values()] == [len(client.log) - 1] * 3
    client.go()
    assert [token.token for token in client.finish()] == rest


def deliver_all(pump: Pump) -> None:
    pump.collect()
    for key in [key for key, items in pump.lanes.items() if items]:
        while pump.lanes[key]:
            pump.deliver(key)


def run_without(pump: Pump, idle: Server) -> None:
    """Until nothing moves but the steps of one server."""
    for _ in range(50):
        pump.collect()
        for key in [key for key, items in pump.lanes.items() if items]:
            pump.deliver(key)
        for server in pump.servers.values():
            if server is not idle and server.plan(pump.now):
                server.retire(pump.now)


def test_a_copy_and_the_rows_of_others_take_turns() -> None:
    pump = Pump()
    client = running(pump)
    spare = opened_beside(client, 1)
    neighbour = Client(
        pump,
        [client.hops[0], (spare.server, 2, 4), client.hops[2]],
        list(range(20)),
        session="b",
        base=500,
    )
    neighbour.start(60, credit=30)
    neighbour.finish()
    warm(spare)
    order(spare)
    neighbour.raise_credit(1000)
    run_without(pump, spare.server)
    seen = []
    while spare.server.plan(pump.now):
        seen.append({type(task) for task in spare.server.out})
        spare.server.retire(pump.now)
    assert seen[:2] == [{KvWrite}, {Work}] and all(len(types) == 1 for types in seen)
    pump.run()
    assert spare.kv == len(client.log) - 1 and not spare.reports


def test_what_is_written_after_a_write_that_failed_does_not_count() -> None:
    pump = Pump()
    client = running(pump)
    spare = opened_beside(client, 1)
    warm(spare)
    order(spare)
    pump.run()
    had = spare.kv
    client.raise_credit(CONTEXT + READ + 3)
    run_without(pump, spare.server)
    spare.server.plan(pump.now)
    assert [type(task) for task in spare.server.out] == [KvWrite] * 3
    results = [Result(), Result(error="the device is lost"), Result()]
    spare.server.retire(pump.now, results)
    pump.run()
    assert [report.trouble for report in spare.reports] == [Trouble.FAILED]
    client.fence()
    create = Create(client.session, 2, 4, repair=True)
    fence = Fence(spare.own, WARM_REPLY, client.epoch, 1000, 1000, create)
    pump.put(GATEWAY, spare.server.address.peer, fence)
    pump.run()
    answers = [i for _, i in pump.answers if isinstance(i, Fenced) and i.handle == WARM_REPLY]
    assert answers[-1].kv == had + 1


ROW = 1 << 17  # one position fills a group


def large(pump: Pump) -> Spare:
    """A session of a large model on a fast device is copied: in a step's time half a position of KV may be read."""
    client = opened(pump, hops=1, length=CONTEXT, new=120, row_bytes=ROW, copy_rate=25 * ROW)
    client.go(credit=CONTEXT + READ)
    client.finish()
    spare = opened_beside(client, 0, row_bytes=ROW)
    warm(spare)
    order(spare)
    client.raise_credit(1000)
    return spare


def round_of(pump: Pump, *servers: Server) -> int:
    """A step of rows and one of copies of each. The positions that were read for copies."""
    read = 0
    pump.now += 0.02
    for server in (each for each in servers for _ in range(2)):
        deliver_all(pump)
        if server.plan(pump.now):
            read += sum(task.count for task in server.out if isinstance(task, KvRead))
            server.retire(pump.now)
    deliver_all(pump)
    return read


def test_a_copy_comes_nearer_also_where_new_kv_is_more_than_its_rate() -> None:
    pump = Pump()
    spare = large(pump)
    lags = []
    for _ in range(CONTEXT + READ):
        round_of(pump, *pump.servers.values())
        spare.client.listen()
        lags.append(len(spare.client.log) - 1 - spare.kv)
    assert lags[-1] < 5 < CONTEXT < lags[0], lags


def test_a_copy_that_had_to_wait_does_not_make_up_for_it_in_one_step() -> None:
    pump = Pump()
    spare = large(pump)
    old = spare.client.hops[0][0]
    for _ in range(40):
        at_last = round_of(pump, old)
    assert not at_last, "its window is used up"
    read = [round_of(pump, *pump.servers.values()) for _ in range(20)]
    assert 0 < max(read) <= STEP_BYTES // ROW, read


def test_what_keeps_coming_is_written_as_fast_and_a_burst_is_not() -> None:
    """A target whose steps take eight times as long as those of the hop that it copies: 16 positions come in each."""
    pump = Pump()
    spare = large(pump)
    old = spare.client.hops[0][0]
    written = []
    for _ in range(12):
        for _ in range(8):
            round_of(pump, old)
        spare.server.plan(pump.now)
        written.append(sum(task.count for task in spare.server.out if isinstance(task, KvWrite)))
        spare.server.retire(pump.now)
    assert written[0] == STEP_BYTES // ROW < written[-1], written
