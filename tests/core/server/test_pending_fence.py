"""A Fence waits for the running step while its gateway's lease ends (R2: fencing, R12: admission, R19: leases)."""

from __future__ import annotations

from support.core.scripted_gateway import GATEWAY, Client, ServerNetwork, prompt
from support.core.server import Server

from modelswarm.protocol.messages import Heartbeat

LEASE = 30.0  # seconds
OTHER_GATEWAY = "other/1/a"
PAGES, PAGES_OF_HOP, PAGES_OF_OTHER = 8, 5, 2


def fence_during_step() -> tuple[ServerNetwork, Server]:
    """Ask for a turn of 7 pages while the hop is in a step, and break the link for more than a lease."""
    network = ServerNetwork()
    server = network.serve(0, 6, total_pages=PAGES, page_size=4, lease_seconds=LEASE)
    network.add_gateway(OTHER_GATEWAY)
    route = [(server, 0, 6)]
    other = Client(network, route, prompt(4), "b", gateway=OTHER_GATEWAY, base=200)
    other.start(5)
    other.finish()
    client = Client(network, route, prompt(12))
    client.start(8)
    network.deliver_all()
    assert network.free_pages == [PAGES - PAGES_OF_HOP - PAGES_OF_OTHER]
    assert server.begin_step(network.now)
    client.fence(16)
    network.deliver_all()
    network.cut_link(GATEWAY, server.peer)
    for _ in range(4):
        network.tick(0.3 * LEASE)
        server.core.receive(OTHER_GATEWAY, Heartbeat(), network.now)
    return network, server


def test_hop_is_not_freed_to_make_room_for_its_own_turn() -> None:
    network, server = fence_during_step()
    server.end_step(network.now)
    assert server.core.stats.sessions == 2
    assert network.free_pages == [PAGES - PAGES_OF_HOP - PAGES_OF_OTHER]


def test_pages_of_refused_turn_are_freed_with_its_hop() -> None:
    network, server = fence_during_step()
    server.end_step(network.now)
    network.tick(LEASE)
    assert network.free_pages == [PAGES - PAGES_OF_OTHER]
