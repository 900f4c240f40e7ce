"""Pages and admission: reserves, recoveries, grants, leases and OwnedSessions (R12, admission; R19, leases)."""

from __future__ import annotations

import pytest
from support.core.scripted_gateway import (
    GATEWAY,
    Client,
    ServerNetwork,
    make_clients,
    opened,
    prompt,
    route,
)
from support.core.server import Server

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import (
    Close,
    Create,
    FaultKind,
    FaultReport,
    Fence,
    FenceAck,
    Heartbeat,
    LogRequest,
    OwnedSession,
    OwnedSessions,
    Refusal,
    Role,
    StartEpoch,
    Turn,
)
from modelswarm_serving.core.kv.admission import MEMORY_PAUSE_SECONDS, RESERVATION_SECONDS
from modelswarm_serving.core.settings import pipeline_rows, row_window


def create(
    network: ServerNetwork,
    server: Server,
    session: str,
    reserve: int,
    *,
    blocks: tuple[int, int] = (0, 6),
    repair: bool = False,
    gateway: str = GATEWAY,
    end: int | None = None,
) -> FenceAck:
    turn = Turn(reserve, reserve + 1 if end is None else end)
    item = Fence(0, 1, Epoch(1, 1), 0, 0, Create(session, *blocks, for_recovery=repair), turn)
    server.core.receive(gateway, item, network.now)
    network.deliver_all(to=gateway)
    answer = network.answers[-1][1]
    assert isinstance(answer, FenceAck)
    return answer


def test_create_reserves_pages_and_keeps_a_tenth_for_recovery() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    assert create(network, server, "a", 33).free_pages == 20 - 9
    assert create(network, server, "b", 36).refusal is None
    refused = create(network, server, "c", 1)
    assert (refused.refusal, refused.server_handle, refused.free_pages) == (Refusal.NO_PAGES, 0, 2)
    assert server.core.stats.sessions == 2
    assert create(network, server, "c", 8, repair=True).refusal is None
    assert create(network, server, "d", 1, repair=True).refusal is Refusal.NO_PAGES
    assert server.core.stats.free_pages == 0


def test_new_session_gets_no_pages_that_a_recovery_awaits() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    held = create(network, server, "a", 40)
    create(network, server, "b", 28)
    assert create(network, server, "r", 44, repair=True).refusal is Refusal.NO_PAGES
    server.core.receive(GATEWAY, Close(held.server_handle), network.now)
    refused = create(network, server, "c", 12)
    assert refused.refusal is Refusal.NO_PAGES, "13 are free, 11 are awaited"
    assert create(network, server, "d", 8).refusal is None, "it needs none of the awaited pages"
    assert create(network, server, "r", 44, repair=True).refusal is None
    assert server.core.stats.free_pages == 0


def test_page_reservation_of_refused_recovery_expires() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    create(network, server, "a", 40)
    assert create(network, server, "r", 44, repair=True).refusal is Refusal.NO_PAGES
    assert create(network, server, "c", 8).refusal is Refusal.NO_PAGES
    network.tick(RESERVATION_SECONDS + 0.1)
    assert create(network, server, "c", 8).refusal is None


def test_small_recovery_keeps_reservation_of_larger_one() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    held = create(network, server, "a", 40)
    create(network, server, "b", 28)
    assert create(network, server, "large", 44, repair=True).refusal is Refusal.NO_PAGES
    assert create(network, server, "small", 4, repair=True).refusal is None, (
        "the free pages are enough for it"
    )
    server.core.receive(GATEWAY, Close(held.server_handle), network.now)
    assert create(network, server, "c", 8).refusal is Refusal.NO_PAGES, (
        "12 are free, 11 are awaited"
    )
    assert create(network, server, "large", 44, repair=True).refusal is None
    server.core.receive(GATEWAY, Close(network.answers[-1][1].server_handle), network.now)  # type: ignore[union-attr]
    assert create(network, server, "c", 8).refusal is None, (
        "the recovery was admitted: no page is awaited"
    )


def test_admitted_recovery_keeps_reservation_of_smaller_one() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    held = create(network, server, "a", 40)
    create(network, server, "b", 28)
    assert create(network, server, "large", 44, repair=True).refusal is Refusal.NO_PAGES
    assert create(network, server, "small", 16, repair=True).refusal is Refusal.NO_PAGES
    server.core.receive(GATEWAY, Close(held.server_handle), network.now)
    large = create(network, server, "large", 44, repair=True)
    assert large.refusal is None
    server.core.receive(GATEWAY, Close(large.server_handle), network.now)
    assert create(network, server, "c", 40).refusal is Refusal.NO_PAGES, (
        "13 are free, 4 are awaited"
    )
    network.tick(RESERVATION_SECONDS + 0.1)
    assert create(network, server, "c", 40).refusal is None


def next_turn(
    network: ServerNetwork, server: Server, own: int, reserve: int, epoch: int
) -> FenceAck:
    turn = Turn(reserve, reserve + 1)
    server.core.receive(GATEWAY, Fence(own, 1, Epoch(epoch, 1), 0, 0, None, turn), network.now)
    network.deliver_all(to=GATEWAY)
    answer = network.answers[-1][1]
    assert isinstance(answer, FenceAck)
    return answer


def test_only_growing_turn_is_refused_for_awaited_pages() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    held = create(network, server, "a", 28)
    own = create(network, server, "b", 28).server_handle
    assert create(network, server, "r", 44, repair=True).refusal is Refusal.NO_PAGES
    assert next_turn(network, server, own, 28, 2).refusal is None, "its pages are enough"
    server.core.receive(GATEWAY, Close(held.server_handle), network.now)
    assert next_turn(network, server, own, 40, 3).refusal is Refusal.NO_PAGES, "13 free, 11 awaited"
    assert next_turn(network, server, own, 20, 4).refusal is None
    assert create(network, server, "r", 44, repair=True).refusal is None
    assert next_turn(network, server, own, 24, 5).refusal is None


def test_session_may_use_pages_awaited_by_its_own_recovery() -> None:
    """A hop of the session grows on a server where a recovery of the same session waits for pages."""
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    own = create(network, server, "a", 28, blocks=(0, 3)).server_handle
    create(network, server, "b", 16, blocks=(0, 3))
    assert create(network, server, "a", 40, blocks=(3, 6), repair=True).refusal is Refusal.NO_PAGES
    assert create(network, server, "c", 4).refusal is Refusal.NO_PAGES, "9 are free, 10 are awaited"
    assert next_turn(network, server, own, 32, 2).refusal is None


def test_refused_create_allocates_nothing() -> None:
    network = ServerNetwork()
    server = network.serve(2, 4, total_pages=20, max_length=60)
    assert create(network, server, "a", 61, blocks=(2, 4)).refusal is Refusal.TOO_LONG
    assert create(network, server, "a", 10, blocks=(2, 4), end=12).refusal is Refusal.TOO_LONG
    for blocks in ((0, 4), (2, 5), (3, 3), (4, 2), (-1, 3)):
        assert create(network, server, "a", 4, blocks=blocks).refusal is Refusal.WRONG_BLOCKS
    assert server.core.stats.sessions == 0 and network.free_pages == [20]
    assert create(network, server, "a", 60, blocks=(2, 4)).refusal is None


def test_create_that_can_never_fit_is_refused_as_too_long() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20)
    assert create(network, server, "a", 77).refusal is Refusal.TOO_LONG
    assert create(network, server, "a", 77, repair=True).refusal is None


def test_announced_length_is_the_longest_of_an_empty_server() -> None:
    """18 of 20 pages are for new sessions: 72 positions."""
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    assert server.core.max_session_length == 72
    assert create(network, server, "b", 73).refusal is Refusal.TOO_LONG
    assert create(network, server, "a", 72).refusal is None
    assert network.serve(0, 6, total_pages=20, max_length=60).core.max_session_length == 60


def test_draining_server_refuses_new_session() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6)
    create(network, server, "a", 9)
    server.core.start_draining(0.0)
    assert create(network, server, "b", 9).refusal is Refusal.DRAINING
    assert server.core.heartbeat().draining and server.core.heartbeat().sessions == 1


def test_draining_server_reports_once_and_stays_until_unused() -> None:
    network = ServerNetwork()
    client = opened(network, hops=1, length=9, new=5)
    core = client.hops[0][0].core
    client.resume(credit=11)
    core.start_draining(network.now)
    client.finish()
    assert [report.kind for report in client.reports] == [FaultKind.DRAINING]
    assert core.is_in_use(network.now)
    client.raise_credit(100)
    assert len(client.finish()) == 5
    assert not core.is_in_use(network.now)  # the turn has ended


def test_idle_or_orphaned_session_is_not_in_use() -> None:
    network = ServerNetwork()
    client = opened(network, hops=2, length=9, new=5)
    client.resume(credit=11)
    core = client.hops[0][0].core
    assert core.is_in_use(network.now + 4.9) and not core.is_in_use(network.now + 5.1)
    network.cut_link(GATEWAY, client.hops[0][0].peer)
    assert not core.is_in_use(network.now)


def test_hop_without_start_epoch_is_freed_and_reported() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(9))
    client.refence(5)
    network.tick(4.9)
    assert all(pages < 64 for pages in network.free_pages)
    network.tick(0.2)
    assert network.free_pages == [64, 64]
    client.resume()
    assert {report.kind for report in client.reports} == {FaultKind.UNKNOWN_HANDLE}
    assert {report.handle for report in client.reports} == {100, 101}
    assert len(client.reports) == 4  # at the end of the grant, and again for the StartEpoch


def test_parked_hop_outlives_grant_timeout() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(9))
    client.start(5)
    client.finish()
    client.refence()
    network.tick(1000.0)
    assert all(pages < 64 for pages in network.free_pages)
    client.close()
    network.run()
    assert network.free_pages == [64, 64]


def test_sessions_of_lost_gateway_are_freed_at_twice_the_lease() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(9))
    client.start(20)
    for server in network.servers.values():
        server.core.on_peer_lost(GATEWAY, network.now)
    network.run()
    assert client.hops[1][0].core.stats.rows == 9 + 19
    assert not client.finish()  # nothing is sent to a lost gateway
    network.tick(59.0)
    assert all(pages < 64 for pages in network.free_pages)
    for server in network.servers.values():
        server.core.on_peer_lost(GATEWAY, network.now)  # a second loss does not restart the lease
    network.tick(1.5)
    assert network.free_pages == [64, 64]


def test_returning_gateway_keeps_only_listed_sessions() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6)
    kept = create(network, server, "kept", 9).server_handle
    renamed = create(network, server, "renamed", 9).server_handle
    create(network, server, "lost", 9)
    network.add_gateway("gateway/2/b", linked=False)
    other = create(network, server, "other", 9, gateway="gateway/2/b").server_handle
    for handle in (kept, renamed, other):
        gateway = "gateway/2/b" if handle == other else GATEWAY
        server.core.receive(
            gateway, StartEpoch(handle, Epoch(1, 1), 1, 0, 0, None, None, None, 9), 0.0
        )
    server.core.on_peer_lost(GATEWAY, 0.0)
    network.tick(50.0)
    server.core.on_peer_connected(GATEWAY, Role.GATEWAY, network.now)
    listed = [OwnedSession("kept", kept, Epoch(1, 1)), OwnedSession("not so", renamed, Epoch(1, 1))]
    server.core.receive(GATEWAY, OwnedSessions(tuple(listed)), network.now)
    assert set(server.core.handles()) == {kept, other}
    network.tick(5.0)
    assert set(server.core.handles()) == {kept, other}
    network.tick(10_000.0)  # one link is up; the other gateway never had one
    assert set(server.core.handles()) == {kept}


def test_hop_missing_in_owned_sessions_is_reported_unknown() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6)
    create(network, server, "new", 9)
    server.core.receive(GATEWAY, OwnedSessions(()), network.now)
    network.deliver_all(to=GATEWAY)
    report = network.answers[-1][1]
    assert isinstance(report, FaultReport)
    assert (report.handle, report.kind) == (1, FaultKind.UNKNOWN_HANDLE)


def test_admission_evicts_only_sessions_with_expired_lease() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20)
    for name, gateway in (("one", "gateway/1/x"), ("two", "gateway/2/x")):
        network.add_gateway(gateway)
        own = create(network, server, name, 36, gateway=gateway).server_handle
        server.core.receive(
            gateway, StartEpoch(own, Epoch(1, 1), 1, 0, 0, None, None, None, 9), 0.0
        )
    server.core.on_peer_lost("gateway/1/x", 0.0)
    network.tick(20.0)
    server.core.on_peer_lost("gateway/2/x", network.now)
    assert create(network, server, "three", 36).refusal is Refusal.NO_PAGES
    network.tick(11.0)
    assert create(network, server, "three", 36).refusal is None
    assert create(network, server, "four", 36).refusal is Refusal.NO_PAGES
    server.core.receive("gateway/2/x", Heartbeat(), network.now)  # restarts its lease
    network.tick(29.0)
    assert create(network, server, "four", 36).refusal is None  # the grant of "three" has ended


@pytest.mark.parametrize("drop", ["close", "lease", "live"])
def test_200_dropped_sessions_free_all_pages(drop: str) -> None:
    network = ServerNetwork(seed=3)
    servers = route(network, 2, total_pages=3000)
    clients = make_clients(network, servers, [1 + at % 13 for at in range(200)])
    for client in clients:
        client.fence(20)
    network.run(1500)
    for client in clients:
        client.listen()
        if len(client.fenced) == 2:
            client.go()
    network.run(3000)
    if drop == "close":
        for client in clients:
            client.listen()
            for index, answer in client.fenced.items():
                client.put(index, Close(answer.server_handle))
    elif drop == "live":
        for server, _, _ in servers:
            network.put(GATEWAY, server.peer, OwnedSessions(()))
    else:
        for server, _, _ in servers:
            server.core.on_peer_lost(GATEWAY, network.now)
    network.run()
    network.tick(61.0)
    assert network.free_pages == [3000, 3000]
    assert not any(server.core.handles() for server in network.servers.values())


@pytest.mark.parametrize(
    ("row_bytes", "rows", "step"),
    [
        (8, 1024, 256),
        (4096, 1024, 256),
        (8192, 512, 256),
        (16384, 256, 128),
        (1 << 20, 32, 16),
    ],
)
def test_row_window_is_about_four_mebibytes_and_holds_two_steps(
    row_bytes: int, rows: int, step: int
) -> None:
    assert row_window(row_bytes) == rows
    assert pipeline_rows(rows) == step


def test_full_device_pauses_admissions_but_not_recoveries() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    server.core.pause_admissions(network.now)
    refused = create(network, server, "a", 4)
    assert (refused.refusal, refused.paused) == (Refusal.NO_PAGES, True), "all pages are free"
    assert create(network, server, "b", 4, repair=True).refusal is None
    network.now += MEMORY_PAUSE_SECONDS
    assert create(network, server, "c", 4).refusal is None


def test_turn_in_reserved_room_is_admitted_in_a_pause() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    own = create(network, server, "a", 28).server_handle
    server.core.pause_admissions(network.now)
    assert next_turn(network, server, own, 28, 2).refusal is None
    grown = next_turn(network, server, own, 29, 3)
    assert (grown.refusal, grown.paused) == (Refusal.NO_PAGES, True)
    assert next_turn(network, server, own, 28, 4).refusal is None, "it has kept its pages"


def test_recovery_without_room_is_not_told_of_a_pause() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20, page_size=4)
    create(network, server, "a", 40)
    server.core.pause_admissions(network.now)
    refused = create(network, server, "r", 44, repair=True)
    assert (refused.refusal, refused.paused) == (Refusal.NO_PAGES, False)


def test_pages_of_silent_gateway_are_freed_when_short() -> None:
    """The process is frozen, so its link stays up and nothing comes over it."""
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20)
    frozen, other = "gateway/1/x", "gateway/2/x"
    for name, gateway in (("one", frozen), ("two", other)):
        network.add_gateway(gateway)
        own = create(network, server, name, 36, gateway=gateway).server_handle
        server.core.receive(
            gateway, StartEpoch(own, Epoch(1, 1), 1, 0, 0, None, None, None, 9), 0.0
        )
    for _ in range(29):
        network.tick(1.0)
        server.core.receive(other, Heartbeat(), network.now)
    assert create(network, server, "three", 36).refusal is Refusal.NO_PAGES
    network.tick(1.5)
    assert create(network, server, "three", 36).refusal is None
    assert create(network, server, "four", 36).refusal is Refusal.NO_PAGES, "the other one is heard"
    network.deliver_all(to=frozen)
    report = next(item for to, item in network.answers if isinstance(item, FaultReport))
    assert report.kind is FaultKind.UNKNOWN_HANDLE, "it finds the report when it goes on"


def full_server_of_another_gateway() -> tuple[ServerNetwork, Server, PeerId]:
    """Return a server whose pages are those of a session that this gateway runs."""
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=20)
    gateway = "gateway/1/x"
    network.add_gateway(gateway)
    own = create(network, server, "one", 60, gateway=gateway).server_handle
    server.core.receive(gateway, StartEpoch(own, Epoch(1, 1), 1, 0, 0, None, None, None, 9), 0.0)
    return network, server, gateway


def test_requested_log_is_kept_for_a_lease_when_pages_are_short() -> None:
    """The gateway that asked may be lost before its Fence comes, and this may be the only log."""
    network, server, gateway = full_server_of_another_gateway()
    server.core.on_peer_lost(gateway, 0.0)
    network.tick(31.0)
    server.core.receive(GATEWAY, LogRequest("one"), network.now)
    network.deliver_all(to=GATEWAY)
    assert create(network, server, "two", 36).refusal is Refusal.NO_PAGES
    network.tick(28.0)
    assert create(network, server, "two", 36).refusal is Refusal.NO_PAGES
    network.tick(2.5)
    assert create(network, server, "two", 36).refusal is None


def test_pages_of_leaving_gateway_wait_a_lease_for_takeover() -> None:
    network, server, gateway = full_server_of_another_gateway()
    server.core.receive(gateway, Heartbeat(draining=True), 0.0)
    server.core.on_peer_lost(gateway, 0.0)
    network.tick(29.0)
    assert create(network, server, "two", 36).refusal is Refusal.NO_PAGES
    network.tick(1.5)
    assert create(network, server, "two", 36).refusal is None
