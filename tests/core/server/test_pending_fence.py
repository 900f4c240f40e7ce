"""A Fence that waits for the running step, from a gateway whose lease ends meanwhile (R2, R12, R19)."""

from __future__ import annotations

from support.core.network import GATEWAY, Client, Pump, Server, prompt

from modelswarm.protocol.messages import Role

LEASE = 30.0  # seconds
OTHER_GATEWAY = "other/1/a"
PAGES, PAGES_OF_HOP, PAGES_OF_OTHER = 8, 5, 2


def fence_during_step() -> tuple[Pump, Server]:
    """A hop is in a step when its gateway asks for a turn of 7 pages; then the link breaks for more than a lease."""
    pump = Pump()
    server = pump.serve(0, 6, pages=PAGES, page_size=4, lease_seconds=LEASE)
    server.core.on_peer_connected(OTHER_GATEWAY, Role.GATEWAY, pump.now)
    route = [(server, 0, 6)]
    other = Client(pump, route, prompt(4), "b", gateway=OTHER_GATEWAY, base=200)
    other.start(5)
    other.finish()
    client = Client(pump, route, prompt(12))
    client.start(8)
    deliver_all(pump)
    assert pump.free_pages == [PAGES - PAGES_OF_HOP - PAGES_OF_OTHER]
    assert server.plan(pump.now)
    client.fence(16)
    deliver_all(pump)
    pump.cut_link(GATEWAY, server.address.peer)
    return pump, server


def deliver_all(pump: Pump) -> None:
    for key, items in list(pump.lanes.items()):
        while items:
            pump.deliver(key)


def test_hop_is_not_freed_to_make_room_for_its_own_turn() -> None:
    pump, server = fence_during_step()
    pump.tick(1.2 * LEASE)
    server.retire(pump.now)
    assert server.core.stats.sessions == 2
    assert pump.free_pages == [PAGES - PAGES_OF_HOP - PAGES_OF_OTHER]


def test_pages_of_refused_turn_are_freed_with_its_hop() -> None:
    pump, server = fence_during_step()
    pump.tick(1.2 * LEASE)
    server.retire(pump.now)
    pump.tick(LEASE)
    assert pump.free_pages == [PAGES - PAGES_OF_OTHER]
