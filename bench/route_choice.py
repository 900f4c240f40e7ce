"""How long the choice of a route takes with 10,000 servers of 100 blocks, on one core, and how long it takes to fold in
what their beats say.

The gateway's own fleet: Hellos and beats go in, a route comes out. `choose_ms` is a choice right after prices have
changed, so that all costs-to-go are computed again; in between they are kept for 50 ms and a choice is a walk
(`walk_ms`). `update_ms` is a thousand beats of which a hundred are faults, with the choice that takes them in, divided
by a thousand. All times are CPU times of this one thread.
"""

from __future__ import annotations

import random
import time
from statistics import median

from bench.harness import Bar, Result
from modelswarm.protocol.messages import PROTOCOL_VERSION, Beat, Hello, Lane, Role
from modelswarm_gateway.core.fleet import Fleet
from modelswarm_gateway.core.kinds import kind_of
from modelswarm_gateway.core.pricing import Needs

SERVERS, BLOCKS, ZONES = 10_000, 100, 20
ROUNDS = 40
UPDATES = 1_000
FAULTS = 100
MODEL = "m"


def hello(number: int, rng: random.Random) -> Hello:
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


def beat(rng: random.Random, steps: int) -> Beat:
    running = rng.randrange(20)
    return Beat(
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
    fleet = Fleet(30.0, lambda: rng.getrandbits(64), lambda _: None)
    hellos = [hello(number, rng) for number in range(SERVERS)]
    now = 0.0
    for each in hellos:
        fleet.join(each)
        fleet.beat(each.peer, beat(rng, 1), now)
        fleet.round_trip(each.peer, rng.uniform(0.001, 0.01))
    kind = kind_of(hellos[0])
    needs = Needs(length=4_096, positions=2_048)

    def choose() -> float:
        began = time.process_time()
        legs = fleet.cover(MODEL, kind, (0, BLOCKS), now, between=(None, None), needs=needs)
        assert legs is not None and legs[0].options > 1
        return 1000 * (time.process_time() - began)

    opened = choose()
    chooses, walks, updates = [], [], []
    for number in range(ROUNDS):
        now += 0.1
        for each in rng.sample(hellos, 20):
            fleet.beat(each.peer, beat(rng, 2 + number), now)
        chooses.append(choose())
        walks.append(choose())
    for number in range(5):
        now += 0.1
        told = [(each.peer, beat(rng, 100 + number)) for each in rng.sample(hellos, UPDATES)]
        began = time.process_time()
        for peer, said in told:
            fleet.beat(peer, said, now)
        for peer, _ in told[:FAULTS]:
            fleet.failed(peer, now)
        choose()
        updates.append(1000 * (time.process_time() - began) / UPDATES)
    figures = {
        "choose_ms": median(chooses),
        "choose_max_ms": max(chooses),
        "walk_ms": median(walks),
        "update_ms": median(updates),
        "open_ms": opened,
    }
    return Result(
        name="route_choice",
        figures=figures,
        columns=("figure", "ms"),
        rows=[(name, f"{value:.3f}") for name, value in figures.items()],
        shape=f"{SERVERS} servers, {BLOCKS} blocks, spans of 5 to 40, {ZONES} zones",
        threads=1,
        bars=(Bar("choose_ms", "<=", 5.0), Bar("update_ms", "<=", 0.2)),
    )
