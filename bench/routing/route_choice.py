"""How long the choice of a route takes with 10,000 servers of 100 blocks, on one core, and how long it takes to fold in
what their beats say.

The gateway's own registry: Hellos and beats go in, a route comes out. `choose_ms` is a choice right after prices have
changed, so that all costs-to-go are computed again; in between they are kept for 50 ms and a choice is a walk
(`walk_ms`). `update_ms` is a thousand beats of which a hundred are faults, with the choice that takes them in, divided
by a thousand. `open_ms` is the first choice of all, which prices every server; `link_ms` one after a link has gone down
or come up, as every repair is, and `limit_ms` the question for the longest session that comes with every turn, asked
then. `compare_ms` is the look for slow servers, once a second, where all are alike and a fifth of them has told of
three sizes of steps since. All times are CPU times of this one thread.
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


def run() -> Result:
    rng = random.Random(1)
    registry = ServerRegistry(30.0, lambda: rng.getrandbits(64), lambda _: None)
    hellos = [make_hello(number, rng) for number in range(SERVERS)]
    now = 0.0
    for each in hellos:
        registry.register(each)
        registry.on_heartbeat(each.peer, make_heartbeat(rng, 1), now)
        registry.record_round_trip(each.peer, rng.uniform(0.001, 0.01))
    kind = variant_of(hellos[0])
    needs = Needs(max_length=4_096, kv_positions=2_048)

    def choose() -> float:
        began = time.process_time()
        legs = registry.costs.choose_hops(
            MODEL, kind, (0, BLOCKS), now, between=(None, None), needs=needs
        )
        assert legs is not None and legs[0].options > 1
        return 1000 * (time.process_time() - began)

    opened = choose()
    chooses, walks, updates = [], [], []
    for number in range(ROUNDS):
        now += 0.1
        for each in rng.sample(hellos, 20):
            registry.on_heartbeat(each.peer, make_heartbeat(rng, 2 + number), now)
        chooses.append(choose())
        walks.append(choose())
    for number in range(5):
        now += 0.1
        told = [
            (each.peer, make_heartbeat(rng, 100 + number)) for each in rng.sample(hellos, UPDATES)
        ]
        began = time.process_time()
        for peer, said in told:
            registry.on_heartbeat(peer, said, now)
        for peer, _ in told[:FAULTS]:
            registry.on_step_failed(peer, now)
        choose()
        updates.append(1000 * (time.process_time() - began) / UPDATES)
    links: list[float] = []
    limits: list[float] = []
    for number in range(ROUNDS):
        now += 0.1
        one = hellos[number // 2]
        began = time.process_time()
        if number % 2:
            registry.register(one, now)
        else:
            registry.deregister(one.peer)
        links.append(1000 * (time.process_time() - began) + choose())
        began = time.process_time()
        assert registry.max_length(MODEL) > 0
        limits.append(1000 * (time.process_time() - began))
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
    registry = ServerRegistry(30.0, lambda: rng.getrandbits(64), lambda _: None)
    slowness = OutlierDetector(registry)
    alike = [replace(make_hello(number, rng), first=0, last=20) for number in range(SERVERS)]
    for each in alike:
        registry.register(each)
        slowness.add_server(each.peer)
    said = {each.peer: Heartbeat(steps=1, rows=1, busy_ms=1.0) for each in alike}
    looks = []
    for second in range(10):
        now = float(second)
        told = list(said) if second < 4 else rng.sample(list(said), SERVERS // 5)
        for number, peer in enumerate(told):
            if number % (len(told) // 20) == 0:
                slowness.read_backlog(now)  # at every tick
            for rows in (1, 4, 16):
                before = said[peer]
                said[peer] = replace(
                    before,
                    steps=before.steps + 10,
                    rows=before.rows + 10 * rows,
                    busy_ms=before.busy_ms + rng.uniform(80.0, 120.0),
                )
                registry.on_heartbeat(peer, said[peer], now)
        began = time.process_time()
        assert not slowness.detect(now)
        looks.append(1000 * (time.process_time() - began))
    return median(looks[4:])
