"""The troubles of a simulated world, struck by a seeded schedule; often one right after another, inside the loop.

Never takes away what no protocol can do without: every block keeps a way through servers that will be alive.
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

KEEPALIVE_SECONDS = (
    12.0  # gRPC's, as `modelswarm.protocol.link.grpc_stream` sets it: time and timeout
)


class Faults:
    def __init__(
        self,
        tools: Tools,
        servers: dict[str, ServerProcess],
        boot: Callable[[str, Span, int], None],
        gateways: dict[str, GatewayProcess],
        start_gateway: Callable[[str, int], None],
        leave_gateway: Callable[[GatewayProcess], None],
    ) -> None:
        self.struck: Counter[str] = Counter()
        self._last = 0.0  # when the last one struck
        self._tools = tools
        self._plan = tools.scenario.faults
        self._servers = servers
        self._boot = boot  # starts a server process: name, span, boot number
        self._gateways = gateways
        self._start_gateway = start_gateway  # name, incarnation
        self._leave_gateway = leave_gateway  # which its clients believe to be gone
        self._rng = random.Random(f"faults/{tools.scenario.name}/{tools.scenario.seed}")
        self._coverage = Coverage(
            {name: server.span for name, server in servers.items()},
            tools.scenario.layout.n_blocks,
            lambda: gateways,
        )
        self._kinds = {
            "drop": self._drop,
            "kill": self._kill,
            "freeze": self._freeze,
            "stop": self._stop,
            "stop_gateway": self._stop_gateway,
            "sleep": self._sleep,
            "exile": self._exile,
            "meddle": self._meddle,
            "wedge": self._wedge,
            "hush": self._hush,
            "partition": self._partition,
            "cut_off": self._cut_off,
            "mute": self._mute,
            "drain": self._drain,
            "order": self._order,
            "evict": self._evict,
            "gateway": self._kill_gateway,
            "doom": self._doom_gateway,
            "extinction": self._extinguish,
        }

    @property
    def over(self) -> float:
        """No fault strikes after this."""
        if self._plan.weights and self.struck.total() < self._plan.most:
            return self._plan.until
        return self._last

    def start(self) -> None:
        if self._plan.weights:
            self._schedule(self._plan.gap)

    def _schedule(self, gap: float) -> None:
        self._tools.clock.after(self._rng.expovariate(1 / gap), self._strike)

    def _strike(self) -> None:
        if self._tools.clock.now > self._plan.until or self.struck.total() >= self._plan.most:
            return
        weights = self._plan.weights
        [kind] = self._rng.choices(list(weights), list(weights.values()))
        if self._kinds[kind]():
            self.struck[kind] += 1
            self._last = self._tools.clock.now
        burst = self._rng.random() < self._plan.burst_chance
        self._schedule(self._plan.burst_gap if burst else self._plan.gap)

    # -- kinds -----------------------------------------------------------------------------

    def _drop(self) -> bool:
        pairs = self._tools.network.pairs()
        if not pairs:
            return False
        one, other = self._rng.choice(pairs)
        self._note("drops", f"{one} - {other}")
        self._tools.network.drop(one, other)
        return True

    def _kill(self) -> bool:
        living = [server for server in self._servers.values() if server.alive]
        if not living:
            return False
        self._end(self._rng.choice(living))
        return True

    def _end(self, server: ServerProcess) -> None:
        if not server.alive:
            return
        self._note("kills", server.name)
        server.alive = False
        self._tools.network.died(server.address.peer)
        clock, rng = self._tools.clock, self._rng
        clock.after(rng.uniform(0.0, 0.5), self._forget, server.address.peer)
        if not (rng.random() < self._plan.never_back_chance and self._coverage.lose(server.name)):
            back = rng.expovariate(1 / self._plan.restart)
            clock.after(back, self._restart, server)

    def _restart(self, server: ServerProcess) -> None:
        span = self._coverage.spans.get(server.name)
        if span is None:
            return
        if self._rng.random() < self._plan.reshape_chance:
            blocks = self._tools.scenario.layout.n_blocks
            first = self._rng.randrange(blocks)
            other = first, self._rng.randint(first + 1, blocks)
            if self._coverage.reshape(server.name, other):
                span = other
        self._boot(server.name, span, server.boot + 1)

    def _extinguish(self) -> bool:
        """All servers of a block die and stay dead."""
        block = self._rng.randrange(self._tools.scenario.layout.n_blocks)
        for server in list(self._servers.values()):
            if server.span[0] <= block < server.span[1]:
                self._coverage.spans.pop(server.name, None)
                self._end(server)
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
        self._note("drains", f"{server.name}, which ends after {grace:.3f} at the latest")
        server.retire()
        self._leave(server, self._tools.clock.now + grace)
        return True

    def _leave(self, server: ServerProcess, deadline: float) -> None:
        """As the node does after SIGTERM: it ends when its sessions have been moved away, or when its time is up."""
        clock = self._tools.clock
        if clock.now >= deadline or not server.core.stats.sessions:
            self._end(server)
        else:
            clock.after(BUSY_SECONDS, self._leave, server, deadline)

    def _order(self) -> bool:
        """`modelswarm drain`, perhaps taken back."""
        gateway = self._rng.choice(list(self._gateways.values()))
        server = self._rng.choice(list(self._servers.values()))
        peer = server.address.peer
        self._note("orders", f"{gateway.name} to leave {server.name}")
        gateway.later(0.0, gateway.leave, peer)
        if self._rng.random() < 0.7:
            gateway.later(self._rng.choice((0.02, 0.3, 2.0)), gateway.stay, peer)
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
            self._tools.network.died(gateway.address.peer)
            self._start_gateway(
                gateway.name, gateway.incarnation + self._tools.scenario.layout.gateways
            )

    def _doom_gateway(self) -> bool:
        gateway = self._rng.choice(list(self._gateways.values()))
        gateway.doom(self._rng.randrange(4), lambda: self._end_gateway(gateway))
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
        """SIGSTOP: links stay up, and nothing is read or said."""
        living = [server for server in self._servers.values() if server.alive]
        if not living:
            return False
        server = self._rng.choice(living)
        seconds = self._rng.choice((0.05, 0.5, 2.0)) * self._rng.random()
        self._note("stops", f"{server.name} for {seconds:.3f}")
        server.stop(seconds)
        return True

    def _wedge(self) -> bool:
        """SIGSTOP for long, while others could do what this one does."""
        now = self._tools.clock.now
        living = [server for server in self._servers.values() if server.alive]
        asleep = [server.name for server in living if server.wakes_at > now]
        if not living:
            return False
        server = self._rng.choice(living)
        if not self._coverage.without([server.name, *asleep]):
            return False
        seconds = self._rng.uniform(1.0, 8.0)
        self._note("wedges", f"{server.name} for {seconds:.3f}")
        server.stop(seconds)
        return True

    def _stop_gateway(self) -> bool:
        gateway = self._rng.choice(list(self._gateways.values()))
        seconds = self._rng.choice((0.05, 0.5, 2.0)) * self._rng.random()
        self._note("stops", f"{gateway.name} for {seconds:.3f}")
        gateway.stop(seconds)
        return True

    def _sleep(self) -> bool:
        """A gateway stands still for so long that others may take its sessions over, and then goes on."""
        now = self._tools.clock.now
        busy = [g for g in self._gateways.values() if g.in_turn()]
        if not busy or any(g.wakes_at > now for g in self._gateways.values()):
            return False
        gateway = self._rng.choice(busy)
        lease = self._tools.scenario.layout.lease_seconds
        seconds = lease * self._rng.choice((0.6, 1.1, 2.0, 3.0)) * self._rng.uniform(0.8, 1.2)
        self._note("sleeps", f"{gateway.name} for {seconds:.3f}")
        gateway.stop(seconds)
        self._leave_gateway(gateway)
        return True

    def _exile(self) -> bool:
        """Who took a session over from a gateway that sleeps moves it to servers that this one would not ask."""
        now, gateways = self._tools.clock.now, list(self._gateways.values())
        found = [
            (gateway, heir, session.route)
            for gateway in gateways
            for session in (gateway.in_turn() if gateway.wakes_at > now else ())
            for heir in gateways
            if heir.wakes_at <= now and heir.core.find_view(session.session) is not None
        ]
        if not found:
            return False
        asleep, heir, route = self._rng.choice(found)
        self._note("exiles", f"a session of {asleep.name} from {[hop.peer for hop in route]}")
        for hop in route:
            heir.later(0.0, heir.leave, hop.peer)
            heir.later(asleep.wakes_at - now + 1.0, heir.stay, hop.peer)
        return True

    def _meddle(self) -> bool:
        """Something happens to a server that has a part in a planned move, or to its links."""
        servers = [
            server
            for server in self._servers.values()
            if server.alive and any(g.moves(server.address.peer) for g in self._gateways.values())
        ]
        if not servers:
            return False
        server = self._rng.choice(servers)
        pairs = [pair for pair in self._tools.network.pairs() if server.name in pair]
        if pairs and self._rng.random() < 0.5:
            self._note("drops", f"{pairs[0]}, of which one has a part in a move")
            self._tools.network.drop(*self._rng.choice(pairs))
        else:
            self._end(server)
        return True

    def _hush(self) -> bool:
        """One direction of a pair delivers nothing for a while."""
        pairs = self._tools.network.pairs()
        if not pairs:
            return False
        deaf, mute = self._rng.sample(self._rng.choice(pairs), 2)
        seconds = self._rng.choice((0.05, 0.5, 2.0, 8.0)) * self._rng.random()
        self._note("hushes", f"{deaf} hears nothing of {mute} for {seconds:.3f}")
        self._tools.network.hush(deaf, mute, seconds)
        return True

    def _partition(self) -> bool:
        names = list(self._servers)
        return len(names) > 1 and self._part(*self._rng.sample(names, 2))

    def _cut_off(self) -> bool:
        """A gateway and a server."""
        gateway = self._rng.choice(list(self._gateways))
        return self._part(gateway, self._rng.choice(list(self._servers)))

    def _mute(self) -> bool:
        """Two that talk to each other."""
        pairs = self._tools.network.pairs()
        return bool(pairs) and self._part(*self._rng.choice(pairs))

    def _part(self, one: str, other: str) -> bool:
        """For good: no link of the two will ever be up again."""
        pair = frozenset((one, other))
        if not self._coverage.part(pair):
            return False
        deaf, mute = self._rng.sample(sorted(pair), 2)
        silence = self._silence()
        self._note("parts", f"{deaf} hears nothing of {mute}, and is told after {silence:.3f}")
        self._tools.network.part(deaf, mute, silence)
        return True

    def _silence(self) -> float:
        """Until links that swallow everything one way break, too: soon, or when the deaf side misses its keepalive."""
        if self._plan.lasting_chance and self._rng.random() < self._plan.lasting_chance:
            return self._rng.uniform(0.7, 1.0) * KEEPALIVE_SECONDS
        return self._rng.choice((0.0, 0.05, 0.5))

    def _note(self, what: str, text: str) -> None:
        self._tools.trace.note(self._tools.clock.now, "fault", what, text)
