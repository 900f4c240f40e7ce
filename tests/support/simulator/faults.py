"""Injects the faults of a simulated world by a seeded schedule, often one right after another.

Lasting faults are checked against `ring_coverage.py`, so that a ring over all blocks always remains. A new kind of
fault is a method that returns True if it did something, and an entry in `_kinds`. If nothing reports the fault, its
name belongs in `SILENT_FAULTS` of `scenario.py`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.server_process import ServerProcess, Tools
from support.simulator.ring_coverage import Coverage, Span

from modelswarm.protocol.heartbeat import BUSY_SECONDS
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.link.stream import KEEPALIVE_SECONDS, MISSED_KEEPALIVES

# Time until the link to a silent peer ends, as `modelswarm.protocol.link.stream` has it.
KEEPALIVE_SECONDS = (MISSED_KEEPALIVES + 1) * KEEPALIVE_SECONDS
# Seconds in which a gateway that ends has sent its last messages.
FLUSH_SECONDS = 0.25


class FaultInjector:
    def __init__(
        self,
        tools: Tools,
        servers: dict[str, ServerProcess],
        boot: Callable[[str, Span, int], None],
        gateways: dict[str, GatewayProcess],
        start_gateway: Callable[[str, int], None],
        leave_gateway: Callable[[GatewayProcess], None],
        leave_stopped_gateway: Callable[[GatewayProcess], None],
        leave_turn: Callable[[random.Random], bool],
    ) -> None:
        self.counts: Counter[str] = Counter()  # of injected faults, by kind
        self._last = 0.0  # time of the last one
        self._tools = tools
        self._plan = tools.scenario.faults
        self._servers = servers
        self._boot = boot  # starts a server process: name, span, boot number
        self._gateways = gateways
        self._start_gateway = start_gateway  # name, incarnation
        self._leave_gateway = leave_gateway  # its clients go elsewhere
        self._leave_stopped_gateway = leave_stopped_gateway  # its clients may go elsewhere
        self._leave_turn = leave_turn  # a client leaves its turn and returns elsewhere
        self._rng = random.Random(f"faults/{tools.scenario.name}/{tools.scenario.seed}")
        self._coverage = Coverage(
            {name: server.span for name, server in servers.items()},
            tools.scenario.layout.n_blocks,
            lambda: gateways,
        )
        self._kinds = {
            "drop_link": self._drop_link,
            "kill": self._kill,
            "freeze": self._freeze,
            "stop": self._stop,
            "stop_gateway": self._stop_gateway,
            "stall_gateway": self._stall_gateway,
            "isolate_gateway": self._isolate_gateway,
            "drain_taken_over": self._drain_taken_over,
            "disturb_migration": self._disturb_migration,
            "stop_long": self._stop_long,
            "delay_direction": self._delay_direction,
            "partition": self._partition,
            "cut_off": self._cut_off,
            "part_linked": self._part_linked,
            "drain": self._drain,
            "drain_request": self._drain_request,
            "evict": self._evict,
            "kill_gateway": self._kill_gateway,
            "hand_over": self._hand_over,
            "leave": lambda: self._leave_turn(self._rng),
            "kill_fencing_gateway": self._kill_fencing_gateway,
            "kill_block": self._kill_block,
        }

    @property
    def ends_at(self) -> float:
        """No fault is injected after this time."""
        if self._plan.weights and self.counts.total() < self._plan.max_count:
            return self._plan.until
        return self._last

    def start(self) -> None:
        if self._plan.weights:
            self._schedule(self._plan.mean_gap)

    def _schedule(self, gap: float) -> None:
        self._tools.clock.after(self._rng.expovariate(1 / gap), self._inject)

    def _inject(self) -> None:
        if self._tools.clock.now > self._plan.until or self.counts.total() >= self._plan.max_count:
            return
        weights = self._plan.weights
        [kind] = self._rng.choices(list(weights), list(weights.values()))
        if self._kinds[kind]():
            self.counts[kind] += 1
            self._last = self._tools.clock.now
        burst = self._rng.random() < self._plan.burst_chance
        self._schedule(self._plan.burst_gap if burst else self._plan.mean_gap)

    # -- kinds -----------------------------------------------------------------------------

    def _drop_link(self) -> bool:
        pairs = self._tools.network.pairs()
        if not pairs:
            return False
        one, other = self._rng.choice(pairs)
        self._note("drops", f"{one} - {other}")
        self._drop(one, other)
        return True

    def _drop(self, one: str, other: str) -> None:
        self._tools.network.disturbances.record(self._tools.clock.now, one, other)
        self._tools.network.drop(one, other)

    def _kill(self) -> bool:
        living = [server for server in self._servers.values() if server.alive]
        if not living:
            return False
        self._kill_server(self._rng.choice(living))
        return True

    def _kill_server(self, server: ServerProcess) -> None:
        if not server.alive:
            return
        self._note("kills", server.name)
        server.alive = False
        self._tools.network.remove(server.address.peer)
        clock, rng = self._tools.clock, self._rng
        clock.after(rng.uniform(0.0, 0.5), self._forget, server.address.peer)
        if not (
            rng.random() < self._plan.permanent_chance and self._coverage.remove_server(server.name)
        ):
            delay = rng.expovariate(1 / self._plan.restart_seconds)
            clock.after(delay, self._restart, server)

    def _restart(self, server: ServerProcess) -> None:
        span = self._coverage.spans.get(server.name)
        if span is None:
            return
        if self._rng.random() < self._plan.new_span_chance:
            blocks = self._tools.scenario.layout.n_blocks
            first = self._rng.randrange(blocks)
            other = first, self._rng.randint(first + 1, blocks)
            if self._coverage.change_span(server.name, other):
                span = other
        self._boot(server.name, span, server.boot + 1)

    def _kill_block(self) -> bool:
        """Kill all servers of a block for good."""
        block = self._rng.randrange(self._tools.scenario.layout.n_blocks)
        for server in list(self._servers.values()):
            if server.span[0] <= block < server.span[1]:
                self._coverage.spans.pop(server.name, None)
                self._kill_server(server)
        return True

    def _forget(self, peer: PeerId) -> None:
        for gateway in self._gateways.values():
            gateway.forget(peer)

    def _drain(self) -> bool:
        living = [server for server in self._servers.values() if server.alive]
        if not living:
            return False
        server = self._rng.choice(living)
        grace = self._rng.choice((0.1, 0.3, 2.0, 5.0)) * self._rng.random()
        self._note("drains", f"{server.name}, which exits after at most {grace:.3f} s")
        server.start_draining()
        self._end_drain(server, self._tools.clock.now + grace)
        return True

    def _end_drain(self, server: ServerProcess, deadline: float) -> None:
        """Exit as a node does after SIGTERM: when its sessions have migrated, or at the deadline."""
        clock = self._tools.clock
        if clock.now >= deadline or not server.core.stats.sessions:
            self._kill_server(server)
        else:
            clock.after(BUSY_SECONDS, self._end_drain, server, deadline)

    def _drain_request(self) -> bool:
        """`modelswarm drain`, perhaps cancelled later."""
        gateway = self._rng.choice(list(self._gateways.values()))
        server = self._rng.choice(list(self._servers.values()))
        peer = server.address.peer
        self._note("drain request", f"{server.name} at {gateway.name}")
        gateway.later(0.0, gateway.drain, peer)
        if self._rng.random() < 0.7:
            gateway.later(self._rng.choice((0.02, 0.3, 2.0)), gateway.undrain, peer)
        return True

    def _evict(self) -> bool:
        living = [server for server in self._servers.values() if server.alive]
        return bool(living) and self._rng.choice(living).evict()

    def _kill_gateway(self) -> bool:
        self._end_gateway(self._rng.choice(list(self._gateways.values())))
        return True

    def _end_gateway(self, gateway: GatewayProcess) -> None:
        if gateway.alive:
            self._note("kills", gateway.name)
            gateway.alive = False
            self._restart_gateway(gateway)

    def _restart_gateway(self, gateway: GatewayProcess) -> None:
        self._tools.network.remove(gateway.address.peer)
        self._start_gateway(
            gateway.name, gateway.incarnation + self._tools.scenario.layout.gateways
        )

    def _hand_over(self) -> bool:
        """SIGTERM: a gateway relinquishes its sessions while another one runs, and restarts under its name."""
        running = [gateway for gateway in self._gateways.values() if gateway.alive]
        if len(running) < 2:
            return False
        gateway = self._rng.choice(running)
        self._note("hands over", gateway.name)
        gateway.relinquish()
        self._leave_gateway(gateway)
        self._tools.clock.after(FLUSH_SECONDS, self._restart_gateway, gateway)
        return True

    def _kill_fencing_gateway(self) -> bool:
        gateway = self._rng.choice(list(self._gateways.values()))
        gateway.kill_after_fences(self._rng.randrange(4), lambda: self._end_gateway(gateway))
        return True

    def _freeze(self) -> bool:
        living = [server for server in self._servers.values() if server.alive]
        if not living:
            return False
        server = self._rng.choice(living)
        seconds = self._rng.uniform(0.0, 0.5)
        self._note("freezes", f"{server.name} for {seconds:.3f}")
        server.freeze(seconds)
        return True

    def _stop(self) -> bool:
        """SIGSTOP: links stay up, and nothing is read or sent."""
        living = [server for server in self._servers.values() if server.alive]
        if not living:
            return False
        server = self._rng.choice(living)
        seconds = self._rng.choice((0.05, 0.5, 2.0)) * self._rng.random()
        self._note("stops", f"{server.name} for {seconds:.3f}")
        server.stop(seconds)
        return True

    def _stop_long(self) -> bool:
        """SIGSTOP for long, while other servers hold the same blocks."""
        now = self._tools.clock.now
        living = [server for server in self._servers.values() if server.alive]
        stopped = [server.name for server in living if server.resumes_at > now]
        if not living:
            return False
        server = self._rng.choice(living)
        if not self._coverage.suffices_without([server.name, *stopped]):
            return False
        seconds = self._rng.uniform(1.0, 8.0)
        self._note("stops", f"{server.name} for {seconds:.3f}")
        server.stop(seconds)
        return True

    def _stop_gateway(self) -> bool:
        gateway = self._rng.choice(list(self._gateways.values()))
        seconds = self._rng.choice((0.05, 0.5, 2.0)) * self._rng.random()
        self._note("stops", f"{gateway.name} for {seconds:.3f}")
        gateway.stop(seconds)
        return True

    def _stall_gateway(self) -> bool:
        """Stop a gateway for so long that others may take over its sessions, and then resume it."""
        now = self._tools.clock.now
        busy = [g for g in self._gateways.values() if g.views_in_turn()]
        if not busy or any(g.resumes_at > now for g in self._gateways.values()):
            return False
        gateway = self._rng.choice(busy)
        lease = self._tools.scenario.layout.lease_seconds
        seconds = lease * self._rng.choice((0.6, 1.1, 2.0, 3.0)) * self._rng.uniform(0.8, 1.2)
        self._note("stalls", f"{gateway.name} for {seconds:.3f}")
        gateway.stop(seconds)
        self._leave_stopped_gateway(gateway)
        return True

    def _isolate_gateway(self) -> bool:
        """Cut a gateway off from all servers for so long that others may take over its sessions."""
        now = self._tools.clock.now
        busy = [g for g in self._gateways.values() if g.views_in_turn()]
        if not busy or any(g.isolated_until > now for g in self._gateways.values()):
            return False
        gateway = self._rng.choice(busy)
        lease = self._tools.scenario.layout.lease_seconds
        seconds = lease * self._rng.choice((0.6, 1.6, 2.0, 3.0)) * self._rng.uniform(0.8, 1.2)
        self._note("isolates", f"{gateway.name} for {seconds:.3f}")
        if now - gateway.isolated_until > 2 * lease:  # else it has hardly been back
            gateway.isolated_since = now
        gateway.isolated_until = now + seconds
        self._tools.network.isolate(gateway.name, seconds)
        self._leave_stopped_gateway(gateway)
        return True

    def _drain_taken_over(self) -> bool:
        """Drain the servers of a session that was taken over from a stalled gateway, at its new gateway.

        The session then migrates to servers to which the stalled gateway sends no Fence.
        """
        now, gateways = self._tools.clock.now, list(self._gateways.values())
        found = [
            (gateway, new_owner, session.route)
            for gateway in gateways
            for session in (gateway.views_in_turn() if gateway.resumes_at > now else ())
            for new_owner in gateways
            if new_owner.resumes_at <= now and new_owner.core.find_view(session.session) is not None
        ]
        if not found:
            return False
        stalled, new_owner, route = self._rng.choice(found)
        self._note("drains", f"{[hop.peer for hop in route]} of a session of {stalled.name}")
        for hop in route:
            new_owner.later(0.0, new_owner.drain, hop.peer)
            new_owner.later(stalled.resumes_at - now + 1.0, new_owner.undrain, hop.peer)
        return True

    def _disturb_migration(self) -> bool:
        """Kill a server that takes part in a migration, or break one of its links."""
        servers = [
            server
            for server in self._servers.values()
            if server.alive
            and any(g.is_migrating(server.address.peer) for g in self._gateways.values())
        ]
        if not servers:
            return False
        server = self._rng.choice(servers)
        pairs = [pair for pair in self._tools.network.pairs() if server.name in pair]
        if pairs and self._rng.random() < 0.5:
            pair = self._rng.choice(pairs)
            self._note("drops", f"{pair}, of which one takes part in a migration")
            self._drop(*pair)
        else:
            self._kill_server(server)
        return True

    def _delay_direction(self) -> bool:
        """One direction of a pair delivers nothing for a while."""
        pairs = self._tools.network.pairs()
        if not pairs:
            return False
        receiver, sender = self._rng.sample(self._rng.choice(pairs), 2)
        seconds = self._rng.choice((0.05, 0.5, 2.0, 8.0)) * self._rng.random()
        self._note("delays", f"{receiver} receives nothing of {sender} for {seconds:.3f} s")
        self._tools.network.delay_direction(receiver, sender, seconds)
        return True

    def _partition(self) -> bool:
        names = list(self._servers)
        return len(names) > 1 and self._part(*self._rng.sample(names, 2))

    def _cut_off(self) -> bool:
        """Part a gateway and a server."""
        gateway = self._rng.choice(list(self._gateways))
        return self._part(gateway, self._rng.choice(list(self._servers)))

    def _part_linked(self) -> bool:
        """Part two processes that have a link."""
        pairs = self._tools.network.pairs()
        return bool(pairs) and self._part(*self._rng.choice(pairs))

    def _part(self, one: str, other: str) -> bool:
        """Part two processes for good."""
        pair = frozenset((one, other))
        if not self._coverage.part(pair):
            return False
        receiver, sender = self._rng.sample(sorted(pair), 2)
        silence = self._silence()
        self._note(
            "parts",
            f"{receiver} receives nothing of {sender}; their links break after {silence:.3f} s",
        )
        self._tools.network.part(receiver, sender, silence)
        return True

    def _silence(self) -> float:
        """Return the seconds until links that lose one direction break: few, or up to the keepalive."""
        if self._plan.undetected_chance and self._rng.random() < self._plan.undetected_chance:
            return self._rng.uniform(0.7, 1.0) * KEEPALIVE_SECONDS
        return self._rng.choice((0.0, 0.05, 0.5))

    def _note(self, what: str, text: str) -> None:
        self._tools.trace.note(self._tools.clock.now, "fault", what, text)
