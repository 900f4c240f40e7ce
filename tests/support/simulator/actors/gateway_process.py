"""The shell of a simulated gateway: what the real node does around the core, in virtual time.

Dials every server that it knows of, again and again; passes items in and effects out, and decides nothing else.
"""

from __future__ import annotations

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
READY = 0.01  # seconds in which a new gateway is told of all servers
ORDERED = "ordered"  # why a server is left that an administrator named


class GatewayProcess:
    """The gateway: dials every living server it knows of, again and again."""

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
        self.wakes_at = 0.0
        self.incarnation = incarnation
        self.address = Address(peer_id(name, incarnation, "boot"), "")
        self._rng = random.Random(f"gateway/{tools.scenario.seed}/{name}/{incarnation}")
        self._known: dict[PeerId, Address] = {}
        self.ready_at = tools.clock.now + READY  # it knows who is there
        self._fences_left: int | None = None  # until it dies
        self._die: Callable[[], None] = lambda: None
        self._heartbeats = HeartbeatTimer.for_gateway()
        self.core = tools.cores.gateway(
            self._settings(), self.address.peer, incarnation, tools.draw
        )

    def _settings(self) -> GatewaySettings:
        scenario = self._tools.scenario
        return GatewaySettings(
            hold_limit_seconds=scenario.hold_seconds,
            fence_timeout_seconds=scenario.fenced_seconds,
            copy_attempts=scenario.copy_tries,
            rebalance_after_seconds=scenario.rebalance_seconds,
            fence_ack_seconds=scenario.answer_seconds,
            suspect_after_seconds=scenario.silent_seconds,
            token_timeout_seconds=scenario.overdue_seconds,
            lease_seconds=max(scenario.layout.lease_seconds, 10 * TICK),
            max_input_tokens=scenario.layout.input_tokens,
            max_live_input_tokens=scenario.layout.short_input,
        )

    # -- the directory ---------------------------------------------------------------------

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.wakes_at = max(self.wakes_at, self._tools.clock.now + seconds)

    def doom(self, fences: int, die: Callable[[], None]) -> None:
        """It dies when it has sent so many more Fences: in the middle of them, if a route has more hops."""
        self._fences_left, self._die = fences, die

    def later(self, delay: float, action: Callable[..., None], *args: Any) -> None:
        """What happens in this process, or is asked of it, happens when it is not stopped."""
        self._at(self._tools.clock.now + delay, action, *args)

    def _at(self, time: float, action: Callable[..., None], *args: Any) -> None:
        self._tools.clock.at(time, self._awake, action, *args)

    def _awake(self, action: Callable[..., None], *args: Any) -> None:
        if self._tools.clock.now < self.wakes_at:
            self._at(self.wakes_at, action, *args)
        else:
            action(*args)

    def learn(self, address: Address) -> None:
        self._known[address.peer] = address
        self._dial(address.peer)

    def forget(self, peer: PeerId) -> None:
        self._known.pop(peer, None)

    def cut_off(self) -> list[PeerId]:
        """Servers that it knows of and has no link to: not yet, or not now."""
        linked = {server.peer for server in self.core.server_views()}
        return [peer for peer in self._known if peer not in linked]

    def _dial(self, peer: PeerId) -> None:
        if self.alive and peer in self._known:
            self._tools.network.dial(self.address.peer, self._known[peer])

    # -- the network calls these -----------------------------------------------------------

    def linked(self, other: Endpoint) -> None:
        assert isinstance(other, ServerProcess), "servers never dial gateways"
        self._heartbeats.on_peer_connected(other.address.peer)
        self.core.on_peer_connected(other.hello, self._tools.clock.now)
        self.pump()

    def unlinked(self, peer: PeerId) -> None:
        self._heartbeats.on_peer_lost(peer)
        self.core.on_peer_lost(peer, self._tools.clock.now)
        self.later(self._rng.uniform(0.005, 0.1), self._dial, peer)
        self.pump()

    def received(self, peer: PeerId, item: Item) -> None:
        self.core.receive(peer, item, self._tools.clock.now)
        self.pump()

    # -- what an administrator asks for ----------------------------------------------------

    def leave(self, peer: PeerId) -> None:
        if self.alive:
            self.core.migrations.drain(peer, ORDERED, self._tools.clock.now)
            self.pump()

    def stay(self, peer: PeerId) -> None:
        if self.alive:
            self.core.migrations.undrain(peer, ORDERED, self._tools.clock.now)
            self.pump()

    # -- what faults look for ---------------------------------------------------------------

    def in_turn(self) -> list[SessionView]:
        """The sessions whose turn runs, or is mended."""
        parked = SessionState.PARKED.value
        return [view for view in self.core.session_views() if self.alive and view.state != parked]

    def moves(self, peer: PeerId) -> bool:
        """Whether a session is on its way from there, or to there."""
        return any(
            peer in involved_servers(move) for move in self.core.migrations._migrations.values()
        )

    # -- work ------------------------------------------------------------------------------

    def pump(self) -> None:
        effects = self.core.take_effects()
        for effect in effects:
            if self._dies(effect):
                return
            if isinstance(effect, Send):
                self._tools.network.send(self.address.peer, effect)
                self._heartbeats.on_sent(effect.to.peer, self._tools.clock.now)
            elif isinstance(effect, CloseLink):
                self._tools.network.drop(self.name, pod_of(effect.peer).partition("/")[0])
        if effects:
            self._deliver(self, [each for each in effects if not isinstance(each, Send)])

    def _dies(self, effect: Effect) -> bool:
        """What it says from now on reaches nobody."""
        if self._fences_left is None:
            return False
        if isinstance(effect, Send) and isinstance(effect.item, Fence):
            self._fences_left -= 1
            if self._fences_left == -1:
                self._tools.clock.after(0.0, self._die)
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
