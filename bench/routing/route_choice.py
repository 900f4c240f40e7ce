"""Time of a route choice with 10,000 servers and 100 blocks, on one core, and of updating the costs from heartbeats.

Uses the gateway's own server registry: Hellos and heartbeats go in, a route comes out.

    choose_ms   a choice after costs have changed: all costs-to-go are computed again
    walk_ms     a choice in between: the costs-to-go are kept for 50 ms
    update_ms   a thousand heartbeats, a hundred of them with faults, and the next choice, divided by a thousand
    open_ms     the first choice, which computes the cost of every server
    link_ms     a choice after a link went down or came up, as in every recovery
    limit_ms    the query for the longest possible session, made at every turn, after a link change
    compare_ms  one outlier detection (it runs once a second); all servers are replicas, and a fifth of them has
                reported steps of three sizes since the last one

All times are CPU times of this one thread.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace
from statistics import median

from bench.harness import Bar, Result
from modelswarm.protocol.messages import PROTOCOL_VERSION, Heartbeat, Hello, Lane, Role
from modelswarm_gateway.core.detection.outlier_detector import OutlierDetector
from modelswarm_gateway.core.routing.cost_model import Needs
from modelswarm_gateway.core.routing.server_registry import ServerRegistry
from modelswarm_gateway.core.servers.variant import variant_of

SERVERS, BLOCKS, ZONES = 10_000, 100, 20
ROUNDS = 40
UPDATES = 1_000
FAULTS = 100
MODEL = "m"


def make_hello(number: int, rng: random.Random) -> Hello:
    length = rng.randint(5, 40)
    first = rng.randrange(BLOCKS - length + 1)
    return Hello(
        PROTOCOL_VERSION,
        f"s{number}/1/b",
        Role.SERVER,
        "",
        Lane.LIVE,
        model=MODEL,
        first=first,
        last=first + length,
        n_blocks=BLOCKS,
        max_length=32_768,
        total_pages=2_000,
        page_size=16,
        zone=f"z{rng.randrange(ZONES)}",
    )


def make_heartbeat(rng: random.Random, steps: int) -> Heartbeat:
    running = rng.randrange(20)
    return Heartbeat(
        steps=steps,
        step_ms=rng.uniform(5.0, 50.0),
        free_pages=rng.randrange(200, 2_000),
        total_pages=2_000,
        sessions=running,
        running=running,
        rows=steps,
    )


class RouteChoice:
    """The registry of one gateway with SERVERS linked servers, and a clock that every measurement advances."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0.0
        self._registry = ServerRegistry(30.0, lambda: rng.getrandbits(64), lambda _: None)
        self._hellos = [make_hello(number, rng) for number in range(SERVERS)]
        for hello in self._hellos:
            self._registry.register(hello)
            self._registry.on_heartbeat(hello.peer, make_heartbeat(rng, 1), self._now)
            self._registry.record_round_trip(hello.peer, rng.uniform(0.001, 0.01))
        self._variant = variant_of(self._hellos[0])
        self._needs = Needs(max_length=4_096, kv_positions=2_048)

    def choose(self) -> float:
        """Choose a route; return the milliseconds."""
        began = time.process_time()
        hops = self._registry.costs.choose_hops(
            MODEL, self._variant, (0, BLOCKS), self._now, between=(None, None), needs=self._needs
        )
        assert hops is not None and hops[0].options > 1
        return 1000 * (time.process_time() - began)

    def measure_choices(self) -> tuple[list[float], list[float]]:
        """Return the ms of choices right after cost changes, and of the choices that follow them."""
        chooses, walks = [], []
        for number in range(ROUNDS):
            self._now += 0.1
            for hello in self._rng.sample(self._hellos, 20):
                heartbeat = make_heartbeat(self._rng, 2 + number)
                self._registry.on_heartbeat(hello.peer, heartbeat, self._now)
            chooses.append(self.choose())
            walks.append(self.choose())
        return chooses, walks

    def measure_updates(self) -> list[float]:
        """Return the ms per heartbeat, with faults and the next choice."""
        updates = []
        for number in range(5):
            self._now += 0.1
            heartbeats = [
                (hello.peer, make_heartbeat(self._rng, 100 + number))
                for hello in self._rng.sample(self._hellos, UPDATES)
            ]
            began = time.process_time()
            for peer, heartbeat in heartbeats:
                self._registry.on_heartbeat(peer, heartbeat, self._now)
            for peer, _ in heartbeats[:FAULTS]:
                self._registry.on_step_failed(peer, self._now)
            self.choose()
            updates.append(1000 * (time.process_time() - began) / UPDATES)
        return updates

    def measure_link_changes(self) -> tuple[list[float], list[float]]:
        """Return the ms of link changes with the next choice, and of the length queries after them."""
        links, limits = [], []
        for number in range(ROUNDS):
            self._now += 0.1
            hello = self._hellos[number // 2]
            began = time.process_time()
            if number % 2:
                self._registry.register(hello, self._now)
            else:
                self._registry.deregister(hello.peer)
            links.append(1000 * (time.process_time() - began) + self.choose())
            began = time.process_time()
            assert self._registry.max_length(MODEL) > 0
            limits.append(1000 * (time.process_time() - began))
        return links, limits


def run() -> Result:
    rng = random.Random(1)
    routes = RouteChoice(rng)
    opened = routes.choose()
    chooses, walks = routes.measure_choices()
    updates = routes.measure_updates()
    links, limits = routes.measure_link_changes()
    figures = {
        "choose_ms": median(chooses),
        "choose_max_ms": max(chooses),
        "walk_ms": median(walks),
        "update_ms": median(updates),
        "open_ms": opened,
        "link_ms": median(links),
        "link_max_ms": max(links),
        "limit_ms": median(limits),
        "compare_ms": measure_comparison(rng),
    }
    return Result(
        name="route_choice",
        figures=figures,
        columns=("figure", "ms"),
        rows=[(name, f"{value:.3f}") for name, value in figures.items()],
        shape=f"{SERVERS} servers, {BLOCKS} blocks, spans of 5 to 40, {ZONES} zones",
        threads=1,
        bars=(
            Bar("choose_ms", "<=", 5.0),
            Bar("update_ms", "<=", 0.2),
            Bar("link_ms", "<=", 5.0),
            Bar("limit_ms", "<=", 1.0),
            Bar("compare_ms", "<=", 10.0),
        ),
    )


def measure_comparison(rng: random.Random) -> float:
    """Return the median ms of an outlier detection over SERVERS replicas."""
    registry = ServerRegistry(30.0, lambda: rng.getrandbits(64), lambda _: None)
    detector = OutlierDetector(registry)
    alike = [replace(make_hello(number, rng), first=0, last=20) for number in range(SERVERS)]
    for each in alike:
        registry.register(each)
        detector.add_server(each.peer)
    latest = {each.peer: Heartbeat(steps=1, rows=1, busy_ms=1.0, read_bytes=1e9) for each in alike}
    times = []
    for second in range(10):
        now = float(second)
        reporting = list(latest) if second < 4 else rng.sample(list(latest), SERVERS // 5)
        for number, peer in enumerate(reporting):
            if number % (len(reporting) // 20) == 0:
                detector.read_backlog(now)  # at every tick
            for rows in (1, 4, 16):
                before = latest[peer]
                latest[peer] = replace(
                    before,
                    steps=before.steps + 10,
                    rows=before.rows + 10 * rows,
                    busy_ms=before.busy_ms + rng.uniform(80.0, 120.0),
                    read_bytes=before.read_bytes + rng.uniform(0.5e10, 2e10),
                )
                registry.on_heartbeat(peer, latest[peer], now)
        began = time.process_time()
        assert not detector.detect(now)
        times.append(1000 * (time.process_time() - began))
    return median(times[4:])
