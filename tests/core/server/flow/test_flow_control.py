"""Row windows that hops grant together: replays of many sessions over one link stay bounded (R11, windows)."""

from __future__ import annotations

from collections import deque

import pytest
from support.core.scripted_gateway import (
    Client,
    ServerNetwork,
    make_clients,
    route,
    start_all,
)

from modelswarm.protocol.messages import Lane, Rows, Window
from modelswarm_serving.core.flow.flow_control import MIN_WINDOW_DIVISOR

SESSIONS, CONTEXT, NEW, READ = 24, 150, 12, 4
ROW_BYTES = 8
WINDOW = 64  # rows
MOST = 4 * WINDOW * ROW_BYTES  # bytes of four windows
LEAST = WINDOW // MIN_WINDOW_DIVISOR * ROW_BYTES


def busy(
    network: ServerNetwork, context: int = CONTEXT, hops: int = 2
) -> tuple[list[Client], list[list[int]]]:
    """Return sessions that have prefilled and generated some tokens, and their remaining reference tokens."""
    servers = route(
        network,
        hops,
        total_pages=4000,
        replay_bytes=1 << 24,
        row_window=WINDOW,
        in_flight_bytes=MOST,
    )
    clients = make_clients(network, servers[:], [context] * SESSIONS)
    start_all(clients, NEW, credit=context + READ)
    network.run()
    for client in clients:
        client.listen()
    return clients, [
        client.expected(client.log, client.end - len(client.log)) for client in clients
    ]


def lose_tail(network: ServerNetwork, clients: list[Client]) -> tuple[str, str, Lane]:
    """Move all sessions to a new tail. Return the bulk lane to it, with nothing delivered yet."""
    head, tail = clients[0].hops[0][0], clients[0].hops[-1][0]
    network.remove(tail.peer)
    _, first, last = clients[0].hops[-1]
    fresh = network.serve(first, last, total_pages=4000, row_window=WINDOW, in_flight_bytes=MOST)
    for client in clients:
        client.hops[-1] = (fresh, first, last)
        client.own[-1] = 0
        client.fence(repair=True)
    network.run()
    for client in clients:
        client.listen()
        client.go()
    return (head.peer, fresh.peer, Lane.BULK)


def run_but(network: ServerNetwork, still: tuple[str, str, Lane]) -> int:
    """Run until only lane `still` has messages. Return the bytes of its rows."""
    network.held.add(still)
    network.run()
    network.held.remove(still)
    return sum(len(item.payload) for item in network.lanes.get(still, ()) if isinstance(item, Rows))


def test_rows_in_flight_are_bounded_during_many_replays() -> None:
    network = ServerNetwork()
    clients, rest = busy(network)
    lane = lose_tail(network, clients)
    assert MOST < run_but(network, lane) <= MOST + SESSIONS * LEAST
    most = 0
    while network.lanes.get(lane):
        network.deliver(lane)
        most = max(most, run_but(network, lane))
    assert most <= MOST + SESSIONS * LEAST
    for client, tokens in zip(clients, rest, strict=True):
        assert [token.token for token in client.finish()] == tokens
        assert not client.reports


def test_rows_in_flight_are_bounded_during_many_prefills() -> None:
    network = ServerNetwork()
    servers = route(network, 2, total_pages=4000, row_window=WINDOW, in_flight_bytes=MOST)
    clients = make_clients(network, servers, [CONTEXT] * SESSIONS)
    rest = [client.expected(client.log, NEW) for client in clients]
    start_all(clients, NEW)
    head, tail = (server.peer for server, _, _ in servers)
    assert MOST < run_but(network, (head, tail, Lane.BULK)) <= MOST + SESSIONS * LEAST
    for client, tokens in zip(clients, rest, strict=True):
        assert [token.token for token in client.finish()] == tokens


@pytest.mark.parametrize("seed", range(4))
def test_closed_and_fenced_sessions_release_their_windows(seed: int) -> None:
    """Some sessions that use the shared limit are closed in the middle, others are fenced again."""
    network = ServerNetwork(seed=seed)
    clients, rest = busy(network, hops=3)
    lose_tail(network, clients)
    network.run(network.random.randrange(100, 800))
    for client in clients[:5]:
        client.close()
    for client in clients[5:10]:
        client.listen()
    again = [client for client in clients[5:10] if not client.tokens]
    assert again
    for client in again:
        client.fence()
    network.run()
    for server in network.servers.values():
        assert not server.core._flow_control._in_flight, "a fenced session has no rows in flight"
    for client in again:
        client.listen()
        client.go()
    for client, tokens in list(zip(clients, rest, strict=True))[5:]:
        assert [token.token for token in client.finish()] == tokens
        assert not client.reports
    for server in network.servers.values():
        windows = server.core._flow_control
        assert not windows._in_flight and not windows._in_flight_from


def test_session_with_lost_rows_delays_no_other_session() -> None:
    """The rows of sessions that use the shared limit are lost. The others still have the smallest window."""
    network = ServerNetwork()
    clients, rest = busy(network)
    lane = lose_tail(network, clients)
    run_but(network, lane)
    stuck = {client.own[-1] for client in clients[:4]}  # the first four use the whole limit
    kept = [
        item for item in network.lanes[lane] if isinstance(item, Rows) and item.handle not in stuck
    ]
    assert len(kept) < len(network.lanes[lane])
    while waits := [
        item
        for item in network.lanes.pop(lane, ())
        if isinstance(item, Rows) and item.handle not in stuck
    ]:
        network.lanes[lane] = deque(waits)
        network.deliver(lane)
        run_but(network, lane)
    for client, tokens in list(zip(clients, rest, strict=True))[4:]:
        assert [token.token for token in client.finish()] == tokens


def test_decode_rows_need_no_extra_window_messages() -> None:
    """Rows from n on do not count towards the shared limit, so each window message grants half a window."""
    network = ServerNetwork()
    servers = route(network, 2, total_pages=4000, row_window=WINDOW, in_flight_bytes=MOST)
    clients = make_clients(network, servers, [3] * 8)
    start_all(clients, 150)
    for client in clients:
        assert len(client.finish()) == 150
    windows = network.sent(Window, servers[1][0].peer)
    assert len(windows) <= len(clients) * (2 + 150 // (WINDOW // 2))
