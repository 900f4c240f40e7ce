"""Oracles of ownership and progress: one owner, no waiting client without one, no starvation, no innocent ejected.

And one of leaks: a hop that a session has left is freed soon.

`world.py` calls them, `network.py` and `faults.py` record what the scenario disturbs. Each raises `Violation`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from support.simulator.actors.client import Client
from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.server_process import ServerProcess
from support.simulator.network import Disturbances
from support.simulator.scenario import Scenario
from support.simulator.trace import Violation

from modelswarm.protocol.identity import Handle, PeerId, name_of
from modelswarm_gateway.core.routing.server_registry import SLOW_CAUSE
from modelswarm_gateway.core.servers.step_times import MIN_HEARTBEATS
from modelswarm_gateway.core.sessions.session import SessionState
from modelswarm_serving.core.hops.hop import Hop

RUNNING = SessionState.RUNNING.value
MAX_LEFT_SECONDS = 0.5  # in which a hop is freed that its session has left
MAX_TWO_OWNERS_SECONDS = 0.5  # in which one of two gateways that run a session learns of the other


class Ownership:
    """At most one gateway runs a session, and a gateway holds each session whose client waits (R20, ownership)."""

    def __init__(
        self,
        scenario: Scenario,
        clients: Mapping[str, Client],
        gateways: Mapping[str, GatewayProcess],
    ) -> None:
        self._scenario = scenario
        self._clients = clients
        self._gateways = gateways
        self._twice: dict[str, float] = {}  # sessions that two gateways run, since when
        self._ownerless: dict[str, float] = {}  # sessions of waiting clients, since when
        self.longest_ownerless = 0.0

    def check(self, now: float, calm_since: float) -> None:
        """Check all sessions; `calm_since` is the end of the last fault."""
        self._check_rivals(now)
        self._check_ownerless(now, calm_since)

    def _check_rivals(self, now: float) -> None:
        """Check that no two gateways run one session, but for the moment that it takes to learn of the other one.

        A gateway that is stopped, is cut off or has just come back cannot know.
        """
        lease = self._scenario.layout.lease_seconds
        running: Counter[str] = Counter()
        for gateway in self._gateways.values():
            if now - max(gateway.resumes_at, gateway.isolated_until) > lease:
                running.update(
                    view.session for view in gateway.views_in_turn() if view.state == RUNNING
                )
        twice = {session for session, count in running.items() if count > 1}
        self._twice = {session: self._twice.get(session, now) for session in sorted(twice)}
        for session, since in self._twice.items():
            if now - since > MAX_TWO_OWNERS_SECONDS:
                raise Violation(f"two gateways run {session} since {since:.3f}", session)

    def _check_ownerless(self, now: float, calm_since: float) -> None:
        held = {
            session
            for gateway in self._gateways.values()
            if gateway.alive
            for session in gateway.core._sessions
        }
        waiting = [client.name for client in self._clients.values() if client.is_waiting]
        self._ownerless = {
            name: self._ownerless.get(name, now) for name in waiting if name not in held
        }
        for session, since in self._ownerless.items():
            seconds = now - max(since, calm_since)
            self.longest_ownerless = max(self.longest_ownerless, seconds)
            if seconds > self._scenario.max_ownerless_seconds:
                raise Violation(
                    f"no gateway holds {session} since {since:.3f}, and its client waits", session
                )


class HopLeaks:
    """A hop is freed soon after its session has ended, was refused or has left it, with all it reserved (I5, no leak).

    One that may have the only log stays until the first token of another route. One that a repeated create opened stays
    until its grant ends.
    """

    def __init__(
        self,
        scenario: Scenario,
        servers: Mapping[str, ServerProcess],
        gateways: Mapping[str, GatewayProcess],
        disturbances: Disturbances,
    ) -> None:
        self._has_duplicates = scenario.conditions.duplicate_chance > 0
        self._servers = servers
        self._gateways = gateways
        self._disturbances = disturbances
        self._left: dict[Handle, float] = {}  # since when
        self._groups: dict[Handle, int] = {}  # tokens of the session when it replaced the hop

    def check(self, now: float) -> None:
        running = {
            each.address.peer: each
            for each in self._gateways.values()
            if each.alive and each.resumes_at <= now
        }
        left: dict[Handle, float] = {}
        for server in self._servers.values():
            for hop in server.core._fencing.hops if server.alive else ():
                gateway = running.get(hop.gateway)
                if gateway is None or self._is_used(gateway, hop):
                    continue
                if self._has_duplicates and not hop.was_started:
                    continue
                if hop.in_step or server.core._fencing._unanswered_fence(hop):
                    continue
                if not server.core._peers.is_linked(hop.gateway):
                    continue
                since = left[hop.handle] = self._left.get(hop.handle, now)
                calm = self._disturbances.seconds_since(now, server.name, gateway.name)
                if min(now - since, calm) > MAX_LEFT_SECONDS:
                    text = f"{server.name} has a hop since {since:.3f} that {gateway.name} has left"
                    raise Violation(text, hop.session)
        self._left = left

    def _is_used(self, gateway: GatewayProcess, kept: Hop) -> bool:
        session, hop = gateway.core._recovery.hops.by_handle.get(kept.gateway_handle, (None, None))
        if session is None or hop not in session.lost_hops:
            self._groups.pop(kept.handle, None)
            return session is not None and hop in session.owned_hops
        return self._groups.setdefault(kept.handle, session.groups) == session.groups


class Starvation:
    """One of the sessions that wait for a first token gets it within a bound (R12, admission)."""

    def __init__(self, scenario: Scenario, clients: Mapping[str, Client]) -> None:
        self._scenario = scenario
        self._clients = clients
        self._waiting_since = math.inf
        self.longest = 0.0

    def check(self, now: float, calm_since: float) -> None:
        """Check that a client has progressed; refusals are no progress."""
        waiting = [client for client in self._clients.values() if client.is_waiting]
        if not waiting:
            self._waiting_since = math.inf
            return
        self._waiting_since = min(self._waiting_since, now)
        progress = max(client.served_at for client in self._clients.values())
        seconds = now - max(progress, self._waiting_since, calm_since)
        self.longest = max(self.longest, seconds)
        if seconds > self._scenario.max_starvation_seconds:
            names = [client.name for client in waiting]
            raise Violation(
                f"{names} wait, and no session has progressed for {seconds:.1f} s", names[0]
            )


class Innocence:
    """A server is ejected or suspected only if it, its links or its gateway were disturbed shortly before."""

    def __init__(self, scenario: Scenario, disturbances: Disturbances) -> None:
        self._scenario = scenario
        self._disturbances = disturbances
        self._suspected: dict[str, frozenset[PeerId]] = {}  # by gateway

    def check_suspects(self, gateway: GatewayProcess, now: float) -> None:
        suspected = gateway.core._registry.suspected
        for peer in sorted(suspected - self._suspected.get(gateway.address.peer, frozenset())):
            self.check(gateway, peer, "suspected", now)
        self._suspected[gateway.address.peer] = suspected

    def check(self, gateway: GatewayProcess, peer: PeerId, cause: str, now: float) -> None:
        if cause == SLOW_CAUSE:
            self._check_slow(gateway, peer)
            return
        seconds = self._disturbances.seconds_since(now, name_of(peer), gateway.name)
        if seconds > self._scenario.max_excuse_seconds:
            text = (
                f"{gateway.name} has {cause} {peer}, which was last disturbed {seconds:.3f} s ago"
            )
            raise Violation(text)

    def _check_slow(self, gateway: GatewayProcess, peer: PeerId) -> None:
        """Check that enough steps of this very process were long, however long ago: heartbeats come with steps only.

        Undisturbed steps differ by a factor of 3 at most, and an outlier's by 5. So the median of its heartbeats is of
        long steps: at least two, as there are three heartbeats or more.
        """
        long_steps = self._disturbances.long_steps[peer]
        if long_steps <= MIN_HEARTBEATS // 2:
            raise Violation(f"{gateway.name} has slow {peer}, which had {long_steps} long steps")
