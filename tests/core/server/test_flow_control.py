"""What hops grant their predecessors together: many sessions replayed over one link do not fill it (R11, R12)."""

from __future__ import annotations

import pytest
from support.core.network import Client, Pump, prompt, route, start_all

from modelswarm.protocol.messages import Lane, Rows, Window
from modelswarm_serving.core.flow.flow_control import MIN_WINDOW_DIVISOR

SESSIONS, CONTEXT, NEW, READ = 24, 150, 12, 4
ROW_BYTES = 8
WINDOW = 64  # rows
MOST = 4 * WINDOW * ROW_BYTES  # bytes: four windows
LEAST = WINDOW // MIN_WINDOW_DIVISOR * ROW_BYTES


def busy(pump: Pump, context: int = CONTEXT, hops: int = 2) -> tuple[list[Client], list[list[int]]]:
    """Sessions that have read their prompts and have some tokens; and what must follow."""
    servers = route(
        pump, hops, pages=4000, replay_bytes=1 << 24, row_window=WINDOW, coming_bytes=MOST
    )
    clients = [
        Client(pump, servers[:], prompt(context, at), session=f"s{at}", base=100 * (at + 1))
        for at in range(SESSIONS)
    ]
    for client in clients:
        client.fence(NEW)
    pump.run()
    for client in clients:
        client.listen()
        client.go(credit=context + READ)
    pump.run()
    for client in clients:
        client.listen()
    return clients, [
        client.expected(client.log, client.end - len(client.log)) for client in clients
    ]


def lose_tail(pump: Pump, clients: list[Client]) -> tuple[str, str, Lane]:
    """All sessions are to go on with a new tail; the bulk lane to it, on which nothing has moved yet."""
    head, tail = clients[0].hops[0][0], clients[0].hops[-1][0]
    pump.dead.add(tail.address.peer)
    _, first, last = clients[0].hops[-1]
    fresh = pump.serve(first, last, pages=4000, row_window=WINDOW, coming_bytes=MOST)
    for client in clients:
        client.hops[-1] = (fresh, first, last)
        client.own[-1] = 0
        client.fence(repair=True)
    pump.run()
    for client in clients:
        client.listen()
        client.go()
    return (head.address.peer, fresh.address.peer, Lane.BULK)


def run_but(pump: Pump, still: tuple[str, str, Lane]) -> int:
    """Until nothing moves but what waits on one lane; the bytes of rows there."""
    moved = True
    while moved:
        moved = False
        pump.collect()
        for key in [key for key, items in pump.lanes.items() if items and key != still]:
            moved = True
            while pump.lanes[key]:
                pump.deliver(key)
        for server in pump.servers.values():
            if server.address.peer not in pump.dead and server.plan(pump.now):
                moved = True
                server.retire(pump.now)
    return sum(len(item.payload) for item in pump.lanes[still] if isinstance(item, Rows))


def test_what_is_sent_before_the_wire_drains_is_bounded_however_many_sessions_replay() -> None:
    pump = Pump()
    clients, rest = busy(pump)
    lane = lose_tail(pump, clients)
    assert MOST < run_but(pump, lane) <= MOST + SESSIONS * LEAST
    most = 0
    while pump.lanes[lane]:
        pump.deliver(lane)
        most = max(most, run_but(pump, lane))
    assert most <= MOST + SESSIONS * LEAST
    for client, tokens in zip(clients, rest, strict=True):
        assert [token.token for token in client.finish()] == tokens
        assert not client.reports


def test_prompts_are_bounded_like_replays() -> None:
    pump = Pump()
    servers = route(pump, 2, pages=4000, row_window=WINDOW, coming_bytes=MOST)
    clients = [
        Client(pump, servers, prompt(CONTEXT, at), session=f"s{at}", base=100 * (at + 1))
        for at in range(SESSIONS)
    ]
    rest = [client.expected(client.log, NEW) for client in clients]
    start_all(clients, NEW)
    head, tail = (server.address.peer for server, _, _ in servers)
    assert MOST < run_but(pump, (head, tail, Lane.BULK)) <= MOST + SESSIONS * LEAST
    for client, tokens in zip(clients, rest, strict=True):
        assert [token.token for token in client.finish()] == tokens


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_first_every_session_goes_on(seed: int) -> None:
    """Some of those with a part of the bound end in the middle, others are fenced anew."""
    pump = Pump(seed=seed)
    clients, rest = busy(pump, hops=3)
    lose_tail(pump, clients)
    pump.run(pump.random.randrange(100, 800))
    for client in clients[:5]:
        client.close()
    for client in clients[5:10]:
        client.listen()
    again = [client for client in clients[5:10] if not client.tokens]
    assert again
    for client in again:
        client.fence()
    pump.run()
    for server in pump.servers.values():
        assert not server.core._flow_control._in_flight, (
            "a session that is fenced has nothing coming"
        )
    for client in again:
        client.listen()
        client.go()
    for client, tokens in list(zip(clients, rest, strict=True))[5:]:
        assert [token.token for token in client.finish()] == tokens
        assert not client.reports
    for server in pump.servers.values():
        windows = server.core._flow_control
        assert not windows._in_flight and not windows._in_flight_from


def test_a_session_whose_rows_do_not_come_holds_up_no_other() -> None:
    """Those that have all of the bound never send: their predecessor's steps are of others."""
    pump = Pump()
    clients, rest = busy(pump)
    lane = lose_tail(pump, clients)
    run_but(pump, lane)
    stuck = {client.own[-1] for client in clients[:4]}  # the first four have got it all
    kept = [
        item for item in pump.lanes[lane] if isinstance(item, Rows) and item.handle not in stuck
    ]
    assert len(kept) < len(pump.lanes[lane])
    while True:
        waits = [item for item in pump.lanes[lane] if isinstance(item, Rows)]
        pump.lanes[lane].clear()
        pump.lanes[lane].extend(item for item in waits if item.handle not in stuck)
        if not pump.lanes[lane]:
            break
        pump.deliver(lane)
        run_but(pump, lane)
    for client, tokens in list(zip(clients, rest, strict=True))[4:]:
        assert [token.token for token in client.finish()] == tokens


def test_sessions_that_decode_say_no_more_for_it() -> None:
    """Rows from n on do not count, so a window is granted in halves as if nobody else were there."""
    pump = Pump()
    servers = route(pump, 2, pages=4000, row_window=WINDOW, coming_bytes=MOST)
    clients = [
        Client(pump, servers, prompt(3, at), session=f"s{at}", base=1000 * (at + 1))
        for at in range(8)
    ]
    start_all(clients, 150)
    for client in clients:
        assert len(client.finish()) == 150
    windows = pump.sent(Window, servers[1][0].address.peer)
    assert len(windows) <= len(clients) * (2 + 150 // (WINDOW // 2))
