"""Gini coefficient of the load on 20 equal servers with 400 sessions from 4 independent gateways, in virtual time.

The gateways' server registries choose the routes. They learn of each other's sessions only from the servers'
heartbeats. These come every 2 s for each pair, far less often than real ones: 40 sessions start in between.
A server's step time grows with its sessions. `gini` is the mean over time, for the worse of two shapes with several
seeds each. In one shape every server holds the whole model; the other has four spans of five servers.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import mean

from bench.harness import Bar, Result
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import PROTOCOL_VERSION, Heartbeat, Hello, Lane, Role
from modelswarm_gateway.core.routing.cost_model import Needs
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.variant import variant_of

SERVERS, GATEWAYS, SESSIONS = 20, 4, 400
BLOCKS = 8
HEARTBEAT_SECONDS = 2.0
ARRIVALS_PER_SECOND = 20.0
SESSION_SECONDS = 20.0  # mean session length; with these arrivals about 400 sessions at a time
WARMUP_SECONDS, SECONDS = 40.0, 100.0
SEEDS = 5
MODEL = "m"
NEEDS = Needs(max_length=1_024, kv_positions=1_024)


@dataclass
class VirtualSwarm:
    """The servers and gateways in virtual time, with arrivals, ends and heartbeats in one queue."""

    spans: Sequence[tuple[int, int]]
    rng: random.Random
    running: Counter[PeerId] = field(default_factory=Counter)
    steps: int = 0

    def __post_init__(self) -> None:
        self.hellos = [_make_hello(n, *span) for n, span in enumerate(self.spans)]
        bits = self.rng.getrandbits
        self.registries = [
            ServerRegistry(30.0, lambda: bits(64), lambda _: None) for _ in range(GATEWAYS)
        ]
        for registry in self.registries:
            for hello in self.hellos:
                registry.register(hello)
        self._count = itertools.count()
        self._queue: list[tuple[float, int, str, int, tuple[PeerId, ...]]] = []

    def run(self) -> float:
        """Return the mean Gini coefficient of the servers' load after the warm-up."""
        self._schedule(self.rng.expovariate(ARRIVALS_PER_SECOND), "arrive")
        for gateway, server in itertools.product(range(GATEWAYS), range(SERVERS)):
            self._schedule(
                self.rng.uniform(0.0, HEARTBEAT_SECONDS), "heartbeat", gateway, (str(server),)
            )
        seen: list[float] = []
        now = 0.0
        while now < SECONDS:
            now, _, what, gateway, names = heapq.heappop(self._queue)
            if what == "arrive":
                self._start_session(now)
                self._schedule(now + self.rng.expovariate(ARRIVALS_PER_SECOND), "arrive")
                if now > WARMUP_SECONDS:
                    seen.append(
                        gini_coefficient([self.running[hello.peer] for hello in self.hellos])
                    )
            elif what == "end":
                for peer in names:
                    self.running[peer] -= 1
                    self.registries[gateway].remove_hop(peer)
            else:
                self._send_heartbeat(gateway, self.hellos[int(names[0])], now)
                self._schedule(now + HEARTBEAT_SECONDS, "heartbeat", gateway, names)
        return mean(seen)

    def _schedule(
        self, when: float, what: str, gateway: int = 0, names: tuple[PeerId, ...] = ()
    ) -> None:
        heapq.heappush(self._queue, (when, next(self._count), what, gateway, names))

    def _start_session(self, now: float) -> None:
        gateway = self.rng.randrange(GATEWAYS)
        registry = self.registries[gateway]
        legs = registry.costs.choose_hops(
            MODEL,
            variant_of(self.hellos[0]),
            (0, BLOCKS),
            now,
            between=(None, None),
            needs=NEEDS,
        )
        assert legs is not None
        for leg in legs:
            self.running[leg.peer] += 1
            registry.add_hop(leg.peer, NEEDS.kv_positions, 128)
        peers = tuple(leg.peer for leg in legs)
        self._schedule(now + self.rng.expovariate(1 / SESSION_SECONDS), "end", gateway, peers)

    def _send_heartbeat(self, gateway: int, hello: Hello, now: float) -> None:
        self.steps += 10
        running = self.running[hello.peer]
        heartbeat = Heartbeat(
            steps=self.steps,
            step_ms=(hello.last - hello.first) * (1 + running / 8),
            free_pages=hello.total_pages - 64 * running,
            total_pages=hello.total_pages,
            sessions=running,
            rows=self.steps,
            running=running,
        )
        self.registries[gateway].on_heartbeat(hello.peer, heartbeat, now)


def _make_hello(number: int, first: int, last: int) -> Hello:
    return Hello(
        PROTOCOL_VERSION,
        f"s{number}/1/b",
        Role.SERVER,
        "",
        Lane.LIVE,
        model=MODEL,
        first=first,
        last=last,
        n_blocks=BLOCKS,
        max_length=32_768,
        total_pages=64 * 400,
        page_size=16,
    )


def gini_coefficient(loads: Sequence[float]) -> float:
    """Return the Gini coefficient: 0 if all loads are equal, 1 if one server has all."""
    ordered, total = sorted(loads), sum(loads)
    if not total:
        return 0.0
    weighted = sum((2 * rank - len(ordered) - 1) * load for rank, load in enumerate(ordered, 1))
    return weighted / (len(ordered) * total)


def run() -> Result:
    shapes = {
        "whole": [(0, BLOCKS)] * SERVERS,
        "spans": [(first, first + 2) for first in range(0, BLOCKS, 2) for _ in range(5)],
    }
    measured = {
        name: mean(VirtualSwarm(spans, random.Random(seed)).run() for seed in range(SEEDS))
        for name, spans in shapes.items()
    }
    figures = {"gini": max(measured.values()), **{f"{n}_gini": v for n, v in measured.items()}}
    return Result(
        name="load_gini",
        figures=figures,
        columns=("shape", "gini"),
        rows=[(name, f"{value:.3f}") for name, value in measured.items()],
        shape=f"{SERVERS} servers, {GATEWAYS} gateways, {SESSIONS} sessions, heartbeats of {HEARTBEAT_SECONDS:g} s",
        threads=1,
        bars=(Bar("gini", "<=", 0.1),),
    )
