"""Work of a gateway for links that come and go: it does not grow with sessions and servers of others."""

from __future__ import annotations

from typing import Any

from support.core.gateway import LEASE, TWICE, add_gateway, swarm_of, takeover_network
from support.gateway_service import make_service_with_model
from typing_extensions import override

from modelswarm.protocol.messages import FindSession


class Walked(dict[Any, Any]):
    """Counts the walks over its values."""

    walks = 0

    @override
    def values(self) -> Any:
        self.walks += 1
        return super().values()


async def test_failed_dial_concerns_no_session_and_no_model() -> None:
    """A server that loads its blocks for minutes fails a dial every 2 s, and there may be hundreds of them."""
    _, node = make_service_with_model()
    sessions = node._core._sessions = Walked()
    cards = node._cards_by_name()
    node.on_link_down("s1/1", "connection refused")
    assert sessions.walks == 0
    assert node._cards_by_name() is cards
    node.on_link_down("s0/1/x", "gone")
    assert sessions.walks > 0
    assert node._cards_by_name() is not cards


def test_only_the_server_that_returns_is_asked_for_sessions() -> None:
    """With all links lost for a moment, each session would else walk over all servers for each of them."""
    made = takeover_network()
    for first, last in TWICE:
        made.serve(first, last)
    gateway = add_gateway(made, 1)
    gateway.start("a", [5, 6, 7], 4, above=0)
    servers = list(made.servers)
    for server in servers:
        made.cut_link(gateway.peer, server)
    made.wait(LEASE / 4)
    linked = gateway.core._registry._servers = Walked(gateway.core._registry._servers)
    made.link(gateway.peer, servers[0])
    assert len(made.sent_to(servers[0], FindSession)) == 1
    assert linked.walks == 0


def test_drained_server_that_has_ended_costs_no_walk() -> None:
    """The name stays among the drains, and each tick looked at all sessions for it."""
    swarm = swarm_of(*TWICE)
    first = swarm.gateway
    first.start("a", [5, 6, 7], 4)
    [ended, *_] = first.route("a")
    swarm.core.migrations.drain(ended, "drain", swarm.now)
    swarm.wait(1.0)
    swarm.kill(ended)
    sessions = swarm.core.migrations._sessions = Walked(swarm.core._sessions)
    swarm.wait(1.0)
    assert ended in swarm.core._registry.drains.peers
    assert sessions.walks == 0
