"""A gateway's registry without sessions, links and server cores: registered servers, and choices among them.

Used by the tests of planning and of route costs, which tell the registry what servers would send.
"""

from __future__ import annotations

from collections.abc import Callable

from support.core.server import MODEL, make_server

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat, Hello
from modelswarm_gateway.core.routing.cost_model import Needs
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.variant import variant_of

IDLE = Heartbeat(steps=5, step_ms=8.0, free_pages=2560, total_pages=2560)


def hello(name: str, first: int = 0, last: int = 4) -> Hello:
    return make_server(name, first, last).hello


def registry_of(*hellos: Hello, draw: Callable[[], int] | None = None) -> ServerRegistry:
    """Return a registry of these servers. `draw`: 64 random bits; by default evenly spread numbers."""
    numbers = iter(range(1 << 20))

    def evenly() -> int:
        return (next(numbers) * 0x9E3779B97F4A7C15) % (1 << 64)

    registry = ServerRegistry(30.0, draw or evenly, lambda _: None)
    for hello in hellos:
        assert registry.register(hello)
    return registry


def cover(
    registry: ServerRegistry,
    hello: Hello,
    now: float = 0.0,
    needs: Needs | None = None,
    *,
    cheapest: bool = False,
) -> list[RouteHop]:
    """Return a route over all four blocks by servers of the variant of `hello`; empty if there is none."""
    legs = registry.costs.choose_hops(
        MODEL,
        variant_of(hello),
        (0, 4),
        now,
        between=(None, None),
        needs=needs or Needs(max_length=64, kv_positions=64),
        cheapest=cheapest,
    )
    return legs or []


def place(
    registry: ServerRegistry, hello: Hello, now: float = 0.0, *, cheapest: bool = False
) -> PeerId:
    """Add a session to a server that holds all blocks; return the chosen server."""
    [leg] = cover(registry, hello, now, cheapest=cheapest)
    registry.add_hop(leg.peer, 64, 5)
    return leg.peer
