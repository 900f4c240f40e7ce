"""The shell of a simulated gateway: does in virtual time what the real node does around the core.

Dials all known servers again and again, passes items in and effects out, and decides nothing else.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

from support.simulator.actors.server_process import ServerProcess, Tools
from support.simulator.network import Endpoint

from modelswarm.protocol.heartbeat import HeartbeatTimer
from modelswarm.protocol.identity import Address, PeerId, peer_id, pod_of
from modelswarm.protocol.messages import Fence, Heartbeat, Item, Lane, Send, reply_address
from modelswarm_gateway.core.interface.effects import CloseLink, Effect
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.core.migration.migration import involved_servers
from modelswarm_gateway.core.sessions.session import SessionState

TICK = 0.05
DISCOVERY_SECONDS = 0.01  # in which a new gateway discovers all servers
DRAIN_CAUSE = "ordered"


class GatewayProcess:
    """One incarnation of a gateway."""

    def __init__(
        self,
        tools: Tools,
        deliver: Callable[[GatewayProcess, list[Effect]], None],
        name: str,
        incarnation: int,
    ) -> None:
        self._tools = tools
        self._deliver = deliver
        self.name = name
        self.alive = True
        self.resumes_at = 0.0
        self.isolated_since = math.inf
        self.isolated_until = -math.inf  # it has no links until then
        self.replaces: tuple[PeerId, ...] = ()
        self.incarnation = incarnation
        self.address = Address(peer_id(name, incarnation, "boot"), "")
        self._rng = random.Random(f"gateway/{tools.scenario.seed}/{name}/{incarnation}")
        self._known: dict[PeerId, Address] = {}
        self.discovered_at = tools.clock.now + DISCOVERY_SECONDS
        self._fences_left: int | None = None  # until it is killed
        self._kill: Callable[[], None] = lambda: None
        self._heartbeats = HeartbeatTimer.for_gateway(tools.scenario.layout.lease_seconds)
        self.core = tools.cores.gateway(
            self._settings(), self.address.peer, incarnation, tools.draw
        )

    def _settings(self) -> GatewaySettings:
        scenario = self._tools.scenario
        return GatewaySettings(
            hold_limit_seconds=scenario.hold_limit_seconds,
            fence_timeout_seconds=scenario.fence_timeout_seconds,
            copy_attempts=scenario.copy_attempts,
            rebalance_after_seconds=scenario.rebalance_after_seconds,
            fence_ack_seconds=scenario.fence_ack_seconds,
            suspect_after_seconds=scenario.suspect_after_seconds,
            token_timeout_seconds=scenario.token_timeout_seconds,
            lease_seconds=max(scenario.layout.lease_seconds, 10 * TICK),
            max_input_tokens=scenario.layout.max_input_tokens,
            max_live_input_tokens=scenario.layout.max_live_input_tokens,
        )

    # -- the directory ---------------------------------------------------------------------

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT some seconds later."""
        self.resumes_at = max(self.resumes_at, self._tools.clock.now + seconds)
        self._tools.network.disturbances.record(self.resumes_at, self.name)

    def kill_after_fences(self, fences: int, kill: Callable[[], None]) -> None:
        """Call `kill` after so many more Fences: between two of them, if a route has more hops."""
        self._fences_left, self._kill = fences, kill

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """Run an action in this process after `delay`, or when it resumes if it is stopped then."""
        self._at(self._tools.clock.now + delay, action, *args)

    def _at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._tools.clock.at(time, self._run_if_resumed, action, *args)

    def _run_if_resumed(self, action: Callable[..., None], *args: Any) -> None:
        if self._tools.clock.now < self.resumes_at:
            self._at(self.resumes_at, action, *args)
        else:
            action(*args)

    def learn(self, address: Address) -> None:
        self._known[address.peer] = address
        self._dial(address.peer)

    def forget(self, peer: PeerId) -> None:
        self._known.pop(peer, None)

    def disconnected_servers(self) -> list[PeerId]:
        """Return the known servers without a link."""
        linked = {server.peer for server in self.core.server_views()}
        return [peer for peer in self._known if peer not in linked]

    def _dial(self, peer: PeerId) -> None:
        if self.alive and peer in self._known:
            self._tools.network.dial(self.address.peer, self._known[peer])

    # -- the network calls these -----------------------------------------------------------

    def on_link_up(self, other: Endpoint) -> None:
        assert isinstance(other, ServerProcess), "servers never dial gateways"
        if not self.alive:
            return
        self._heartbeats.on_peer_connected(other.address.peer)
        self.core.on_peer_connected(other.hello, self._tools.clock.now)
        self.pump()

    def on_link_down(self, peer: PeerId) -> None:
        self._heartbeats.on_peer_lost(peer)
        self.core.on_peer_lost(peer, self._tools.clock.now)
        self.later(self._rng.uniform(0.005, 0.1), self._dial, peer)
        self.pump()

    def on_item(self, peer: PeerId, item: Item) -> None:
        self.core.receive(peer, item, self._tools.clock.now)
        self.pump()

    # -- drain requests --------------------------------------------------------------------

    def drain(self, peer: PeerId) -> None:
        if self.alive:
            self.core.migrations.drain(peer, DRAIN_CAUSE, self._tools.clock.now)
            self.pump()

    def undrain(self, peer: PeerId) -> None:
        if self.alive:
            self.core.migrations.undrain(peer, DRAIN_CAUSE, self._tools.clock.now)
            self.pump()

    def cancel_turn(self, session: str) -> None:
        """The client of a session has left."""
        if self.alive and self.core.find_view(session) is not None:
            self.core.cancel_turn(session, self._tools.clock.now)
            self.pump()

    def relinquish(self) -> None:
        """SIGTERM: give up all sessions. What was sent is still delivered; nothing more is received."""
        self.core.relinquish_sessions(self._tools.clock.now)
        self.pump()
        self.alive = False

    # -- views for faults ------------------------------------------------------------------

    def views_in_turn(self) -> list[SessionView]:
        """Return the sessions with a turn, running or in recovery."""
        parked = SessionState.PARKED.value
        return [view for view in self.core.session_views() if self.alive and view.state != parked]

    def is_migrating(self, peer: PeerId) -> bool:
        """True if a session migrates from or to this server."""
        return any(
            peer in involved_servers(migration)
            for migration in self.core.migrations._migrations.values()
        )

    # -- work ------------------------------------------------------------------------------

    def pump(self) -> None:
        if not self.alive:
            return
        effects = self.core.take_effects()
        for effect in effects:
            if self._is_killed_by(effect):
                return
            if isinstance(effect, Send):
                self._tools.network.send(self.address.peer, effect)
                self._heartbeats.on_sent(effect.to.peer, self._tools.clock.now)
            elif isinstance(effect, CloseLink):
                self._tools.network.drop(self.name, pod_of(effect.peer).partition("/")[0])
        if effects:
            self._deliver(self, [each for each in effects if not isinstance(each, Send)])

    def _is_killed_by(self, effect: Effect) -> bool:
        """Count Fences; True if the gateway is killed before this effect is carried out."""
        if self._fences_left is None:
            return False
        if isinstance(effect, Send) and isinstance(effect.item, Fence):
            self._fences_left -= 1
            if self._fences_left == -1:
                self._tools.clock.after(0.0, self._kill)
        return self._fences_left < 0

    def tick(self) -> None:
        if not self.alive:
            return
        now = self._tools.clock.now
        self.core.tick(now)
        self.pump()
        for peer in self._heartbeats.take_due(now, self.core.serving_peers):
            send = Send(reply_address(peer), Lane.LIVE, Heartbeat())
            self._tools.network.send(self.address.peer, send)
        self.later(TICK, self.tick)
