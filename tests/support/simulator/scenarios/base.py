"""From a seed to a scenario. A switch names the kind of trouble that is concentrated on.

Used by tests and by the command line. Changing anything here changes what every seed means.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from support.simulator.actors.server_process import ROW_BYTES
from support.simulator.scenario import NEVER, Faults, Layout, Load, Scenario, Weather
from support.simulator.scenarios import gateways, isolation, migration

from modelswarm_gateway.core.interface.settings import GatewaySettings


def draw(seed: int, name: str = "mixed") -> Scenario:
    """Return the world of a seed; the same for the same (seed, name)."""
    rng = random.Random(f"scenario/{name}/{seed}")
    scenario = Scenario(
        seed, name, _draw_layout(rng), _draw_weather(rng), _draw_faults(rng), _draw_load(rng)
    )
    return _narrow(_concentrate(scenario, rng))


NARROW = ("kills", "tight", "prefill", "loop", "sparse", "rewinds", "long", "evictions", "storm")


def _narrow(scenario: Scenario) -> Scenario:
    """In some worlds of some switches there is room for the rows of few sessions at a time, or of none. Not on a very
    slow bulk lane: a row at a time would take longer there than any deadline."""
    if scenario.name not in NARROW or scenario.weather.bulk_factor > 10:
        return scenario
    rng = random.Random(f"narrow/{scenario.name}/{scenario.seed}")
    rows = rng.choice((4 << 20, 16, 0))
    layout = replace(scenario.layout, coming_bytes=rows * ROW_BYTES)
    return replace(scenario, layout=layout)


def _draw_layout(
    rng: random.Random, ragged: bool | None = None, lengths: Sequence[int] = (1, 2, 2, 3, 3, 4)
) -> Layout:
    hops = rng.choice(lengths)
    n_blocks = rng.randint(hops, hops + 3)
    cuts = [0, *sorted(rng.sample(range(1, n_blocks), hops - 1)), n_blocks]
    spans: list[tuple[int, int]] = []
    for first, last in itertools.pairwise(cuts):
        spans += [(first, last)] * rng.choice((1, 2, 2, 3))
    if rng.random() < 0.2 if ragged is None else ragged:
        for _ in range(rng.randint(1, 3)):
            first = rng.randrange(n_blocks)
            spans.append((first, rng.randint(first + 1, n_blocks)))
    page_size = rng.choice((1, 2, 4, 8))
    return Layout(
        n_blocks=n_blocks,
        spans=tuple(spans),
        page_size=page_size,
        total_pages=4096 // page_size,
        max_length=256,
        token_budget=rng.choice((3, 8, 16, 512)),
        row_window=rng.choice((4, 16, 1024)),
        input_tokens=rng.choice((3, 16, 8192)),
        short_input=rng.choice((0, 4, 256)),
    )


def _draw_weather(rng: random.Random) -> Weather:
    return Weather(
        latency=rng.choice((0.0002, 0.0005, 0.002)),
        bulk_factor=rng.choice((1.0, 1.0, 3.0, 10.0)),
        spike_chance=rng.choice((0.0, 0.0, 0.005)),
        duplicate_chance=rng.choice((0.0, 0.02)),
        slow_step_chance=rng.choice((0.0, 0.0, 0.002)),
        late_notice_chance=rng.choice((0.0, 0.2, 0.5)),
    )


def _draw_faults(rng: random.Random) -> Faults:
    return Faults(
        until=rng.uniform(0.3, 1.2),
        gap=rng.choice((0.02, 0.05, 0.15)),
        weights={"drop": 1.0, "kill": 0.5},
        restart=rng.choice((0.01, 0.05, 0.3)),
        never_back_chance=rng.choice((0.0, 0.3)),
    )


def _draw_load(rng: random.Random) -> Load:
    return Load(sessions=rng.randint(2, 8), turns=rng.randint(1, 4))


def _concentrate(scenario: Scenario, rng: random.Random) -> Scenario:
    """Turn the switch: more of one kind of trouble, less of the others."""
    scenario = SCENARIOS[scenario.name](scenario, rng)
    if not scenario.silent_faults:  # a stall is one that nothing else could have ended
        scenario = replace(scenario, overdue_seconds=5.0, answer_seconds=1.0)
    elif scenario.fenced_seconds == NEVER and rng.random() < 0.7:
        scenario = replace(scenario, fenced_seconds=GatewaySettings().fence_timeout_seconds)
    layout = scenario.layout
    if scenario.weather.duplicate_chance and layout.grant_seconds == NEVER:
        # a repeated create may open a hop that nobody asked for; all others are closed, or freed by Live
        return replace(scenario, layout=replace(layout, grant_seconds=5.0))
    return scenario


def _mixed(scenario: Scenario, rng: random.Random) -> Scenario:
    """A little of everything."""
    weights = {"drop": 1.0, "kill": 0.5, "freeze": 0.1, "drain": 0.1, "evict": 0.1}
    return replace(scenario, faults=replace(scenario.faults, weights=weights))


def _calm(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        weather=Weather(latency=scenario.weather.latency),
        faults=Faults(),
        load=replace(scenario.load, close_chance=0.0),
    )


def _drops(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, faults=replace(scenario.faults, weights={"drop": 1.0}, gap=0.02))


def _kills(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, faults=replace(scenario.faults, weights={"kill": 1.0}, gap=0.04))


def _duplicates(scenario: Scenario, rng: random.Random) -> Scenario:
    weather = replace(
        scenario.weather,
        duplicate_chance=rng.choice((0.05, 0.3)),
        duplicate_delay=rng.choice((0.001, 0.02, 0.1)),
    )
    return replace(scenario, weather=weather, faults=replace(scenario.faults, gap=0.1))


def _delays(scenario: Scenario, rng: random.Random) -> Scenario:
    weather = replace(scenario.weather, spike_chance=0.02, spike=rng.choice((0.02, 0.1, 0.6)))
    return replace(scenario, weather=weather)


def _tight(scenario: Scenario, rng: random.Random) -> Scenario:
    layout = replace(scenario.layout, gateways=rng.choice((1, 1, 2)))
    longest = -(-80 // layout.page_size)
    pages = int(longest * rng.choice((1.3, 2.0, 3.0))) + 1
    load = replace(scenario.load, sessions=rng.randint(4, 10), prompt=(1, 20), max_tokens=(1, 20))
    return replace(
        scenario,
        layout=replace(layout, total_pages=pages, max_length=200),
        load=replace(
            load,
            turns=rng.randint(1, 3),
            think=rng.choice((0.02, 0.1)),
            quit_chance=0.3,
            to_the_end_chance=0.0,
        ),
        faults=replace(scenario.faults, weights={"drop": 1.0, "kill": 1.0}),
    )


def _stalls(scenario: Scenario, rng: random.Random) -> Scenario:
    weather = replace(scenario.weather, slow_step_chance=0.02, slow_step=rng.choice((0.05, 0.5)))
    weights = {"drop": 1.0, "freeze": 1.0, "kill": 0.2}
    return replace(scenario, weather=weather, faults=replace(scenario.faults, weights=weights))


def _prefill(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        layout=replace(scenario.layout, token_budget=rng.choice((2, 3, 5))),
        load=replace(scenario.load, prompt=(20, 60), max_tokens=(1, 6), rewind_chance=0.1),
        faults=replace(scenario.faults, gap=0.02),
    )


def _loop(scenario: Scenario, rng: random.Random) -> Scenario:
    faults = replace(
        scenario.faults, gap=0.1, burst_chance=0.8, burst_gap=rng.choice((0.0005, 0.002, 0.005))
    )
    return replace(scenario, faults=faults)


def _sparse(scenario: Scenario, rng: random.Random) -> Scenario:
    """A fault or two, and then none that could end by chance a stall which they caused."""
    faults = replace(
        scenario.faults,
        most=rng.randint(1, 3),
        gap=rng.uniform(0.01, 0.1),
        burst_gap=rng.choice((0.0005, 0.002, 0.01)),
        weights={"drop": 1.0, "kill": 0.4},
    )
    load = replace(scenario.load, spread=0.05, max_tokens=(8, 30), turns=rng.randint(1, 3))
    return replace(scenario, faults=faults, load=load, patience=4.0)


def _late(scenario: Scenario, rng: random.Random) -> Scenario:
    """Turns follow each other faster than messages travel: much of what arrives is of an older epoch."""
    weather = replace(
        scenario.weather,
        latency=rng.choice((0.002, 0.01)),
        bulk_factor=rng.choice((0.3, 1.0, 5.0)),
        spike_chance=0.03,
        spike=0.05,
        step=0.0005,
    )
    faults = replace(scenario.faults, gap=0.1, weights={"drop": 1.0}, until=1.0)
    load = replace(
        scenario.load,
        turns=rng.randint(4, 8),
        rewind_chance=0.7,
        stop_chance=0.6,
        think=rng.choice((0.0, 0.0, 0.05)),
        prompt=(1, 6),
        max_tokens=(1, 12),
    )
    return replace(scenario, weather=weather, faults=faults, load=load)


def _rewinds(scenario: Scenario, rng: random.Random) -> Scenario:
    load = replace(
        scenario.load,
        turns=rng.randint(3, 6),
        rewind_chance=0.7,
        stop_chance=0.3,
        think=rng.choice((0.0, 0.0, 0.02)),
        max_tokens=(0, 12),
    )
    return replace(scenario, load=load)


def _slow_bulk(scenario: Scenario, rng: random.Random) -> Scenario:
    weather = replace(scenario.weather, bulk_factor=rng.choice((30.0, 100.0)))
    return replace(scenario, weather=weather, load=replace(scenario.load, prompt=(2, 30)))


def _slow_readers(scenario: Scenario, rng: random.Random) -> Scenario:
    load = replace(scenario.load, slow_reader_chance=1.0, read_pause=rng.choice((0.003, 0.02)))
    return replace(scenario, load=load)


def _failures(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        weather=replace(scenario.weather, failed_step_chance=0.01),
        faults=replace(scenario.faults, gap=0.2),
    )


def _ragged(scenario: Scenario, rng: random.Random) -> Scenario:
    layout = _draw_layout(rng, ragged=True)
    return replace(scenario, layout=layout)


def _partition(scenario: Scenario, rng: random.Random) -> Scenario:
    """One pair of servers can never talk again, while every block keeps a way around it."""
    layout = scenario.layout
    return replace(
        scenario,
        layout=replace(layout, spans=layout.spans + tuple(dict.fromkeys(layout.spans))),
        faults=replace(scenario.faults, weights={"drop": 0.5, "kill": 0.2, "partition": 1.0}),
        patience=30.0,
    )


def _deadlines(scenario: Scenario, rng: random.Random) -> Scenario:
    """All patience is short: hops are given up while they live, grants and leases end too early."""
    layout = replace(
        scenario.layout,
        grant_seconds=rng.choice((0.05, 0.3, 5.0)),
        lease_seconds=rng.choice((0.02, 0.2, 5.0)),
    )
    faults = replace(scenario.faults, weights={"drop": 1.0, "freeze": 1.0, "kill": 0.3})
    weather = replace(scenario.weather, spike_chance=0.01, spike=0.3, slow_step_chance=0.01)
    fenced = rng.choice((0.02, 0.1, 0.5))
    return replace(scenario, layout=layout, faults=faults, weather=weather, fenced_seconds=fenced)


def _extinction(scenario: Scenario, rng: random.Random) -> Scenario:
    """A block loses all its servers for good: sessions end honestly, new ones are refused."""
    weights = {"drop": 1.0, "kill": 0.5, "extinction": 0.1}
    load = replace(scenario.load, quit_chance=0.5)
    faults = replace(scenario.faults, weights=weights)
    return replace(scenario, load=load, faults=faults, hold_seconds=rng.choice((0.3, 2.0)))


def _long(scenario: Scenario, rng: random.Random) -> Scenario:
    """Routes of four and five hops."""
    return replace(scenario, layout=_draw_layout(rng, ragged=rng.random() < 0.3, lengths=(4, 5, 5)))


def _reshaped(scenario: Scenario, rng: random.Random) -> Scenario:
    """Killed servers come back with other blocks: boundaries change under the sessions."""
    layout = _draw_layout(rng, ragged=True, lengths=(1, 2, 3, 4, 5))
    faults = replace(
        scenario.faults, weights={"kill": 1.0, "drop": 0.5}, reshape_chance=0.7, gap=0.05
    )
    return replace(scenario, layout=layout, faults=faults)


def _cut_off(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways and servers, and pairs of servers, that can never talk again."""
    layout = scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    layout = replace(layout, spans=spans, gateways=rng.choice((1, 2)))
    weights = {"drop": 0.5, "kill": 0.2, "cut_off": 1.0, "partition": 0.5}
    if layout.lease_seconds == NEVER:  # what a gateway left where it can never go again
        layout = replace(layout, lease_seconds=rng.choice((0.3, 1.0)))
    return replace(
        scenario, layout=layout, faults=replace(scenario.faults, weights=weights), patience=30.0
    )


def _one_way(scenario: Scenario, rng: random.Random) -> Scenario:
    """Pairs of which one hears nothing of the other, and no link breaks for long: nobody is told. Of a single one
    deadlines tell long before the link does; each further one in a session's way doubles them."""
    scenario = _cut_off(scenario, rng)
    quiet = replace(scenario.weather, spike_chance=0.0, slow_step_chance=0.0)
    single = rng.random() < 0.5
    faults = replace(
        scenario.faults,
        weights={"mute": 1.0},
        lasting_chance=1.0,
        gap=0.3,
        until=1.5,
        most=1 if single else 6,
    )
    load = replace(scenario.load, turns=rng.randint(2, 5), max_tokens=(20, 80))
    return replace(
        scenario,
        weather=quiet if single else scenario.weather,
        faults=faults,
        load=load,
        patience=5.0 if single else 30.0,
        fenced_seconds=GatewaySettings().fence_timeout_seconds,
    )


def _stops(scenario: Scenario, rng: random.Random) -> Scenario:
    """SIGSTOP of servers and of the gateway, and links that hold everything back for a while."""
    weights = {"stop": 1.0, "stop_gateway": 0.3, "hush": 1.0, "drop": 0.3, "kill": 0.2}
    return replace(
        scenario, faults=replace(scenario.faults, gap=0.1, weights=weights), patience=20.0
    )


def _silence(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers that are stopped for long, and links that hold everything back: only silence tells."""
    layout = scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    weights = {"wedge": 1.0, "hush": 0.5, "stop_gateway": 0.1, "drop": 0.2, "kill": 0.2}
    faults = replace(scenario.faults, gap=0.2, until=2.0, weights=weights)
    load = replace(scenario.load, spread=1.5, turns=rng.randint(2, 5), think=0.1)
    return replace(
        scenario,
        layout=replace(layout, spans=spans),
        faults=faults,
        load=load,
        patience=20.0,
        fenced_seconds=GatewaySettings().fence_timeout_seconds,
    )


def _frozen(scenario: Scenario, rng: random.Random) -> Scenario:
    """One server is stopped for long, and others hold its blocks: nobody may wait for it."""
    quiet = replace(scenario.weather, spike_chance=0.0, slow_step_chance=0.0)
    scenario = replace(_silence(scenario, rng), weather=quiet)
    faults = replace(scenario.faults, most=1, gap=0.5, weights={"wedge": 1.0})
    return replace(scenario, faults=faults, patience=3.0)


def _storm(scenario: Scenario, rng: random.Random) -> Scenario:
    """Everything at once, on routes of any length."""
    layout = _draw_layout(rng, lengths=(1, 2, 3, 4, 5))
    layout = replace(
        layout,
        spans=layout.spans + tuple(dict.fromkeys(layout.spans)),
        total_pages=rng.choice((160, 400, 4096)) // layout.page_size + 1,
        lease_seconds=rng.choice((0.5, 2.0)),
        gateways=rng.choice((1, 1, 2)),
    )
    weights = dict.fromkeys(("drop", "kill", "freeze", "stop", "stop_gateway", "hush"), 1.0)
    weights["wedge"] = 1.0
    weights |= {"partition": 0.3, "cut_off": 0.3, "drain": 0.5}
    faults = replace(
        scenario.faults,
        weights=weights,
        reshape_chance=rng.choice((0.0, 0.5)),
        gap=0.03,
        burst_chance=0.5,
    )
    load = replace(scenario.load, rewind_chance=0.4, to_the_end_chance=0.0, max_tokens=(0, 16))
    return replace(scenario, layout=layout, faults=faults, load=load, patience=40.0)


def _evictions(scenario: Scenario, rng: random.Random) -> Scenario:
    """Kept rows go at any time, since there is memory for a few sessions' only, or for none."""
    rows = rng.choice((0, 20, 60, 200, 1000))
    load = replace(scenario.load, sessions=rng.randint(4, 10), prompt=(5, 40), spread=0.1)
    faults = replace(scenario.faults, gap=0.03, weights={"drop": 0.5, "kill": 1.0})
    if rng.random() < 0.5:
        scenario = replace(scenario, layout=_draw_layout(rng, lengths=(3, 4, 5)))
    layout = replace(scenario.layout, replay_bytes=rows * 60)
    weather = scenario.weather
    if rng.random() < 0.5:  # ... or right between what is said of them and what is planned with it
        layout = scenario.layout
        weather = replace(weather, evict_chance=rng.choice((0.05, 0.3, 1.0)))
        faults = replace(faults, weights={**faults.weights, "evict": rng.choice((0.5, 3.0))})
    return replace(scenario, layout=layout, load=load, faults=faults, weather=weather)


SCENARIOS: dict[str, Callable[[Scenario, random.Random], Scenario]] = {
    "mixed": _mixed,
    "calm": _calm,
    "drops": _drops,
    "kills": _kills,
    "duplicates": _duplicates,
    "delays": _delays,
    "tight": _tight,
    "stalls": _stalls,
    "prefill": _prefill,
    "loop": _loop,
    "sparse": _sparse,
    "late": _late,
    "rewinds": _rewinds,
    "slow_bulk": _slow_bulk,
    "slow_readers": _slow_readers,
    "failures": _failures,
    "poison": isolation.poison,
    "bursts": isolation.bursts,
    "ragged": _ragged,
    "partition": _partition,
    "deadlines": _deadlines,
    "drains": migration.drains,
    "moves": migration.moves,
    "orders": migration.orders,
    "rebuilds": migration.rebuilds,
    "rebalances": migration.rebalances,
    "gateways": gateways.gateways,
    "extinction": _extinction,
    "adoptions": gateways.adoptions,
    "asleep": gateways.asleep,
    "doomed": gateways.doomed,
    "long": _long,
    "reshaped": _reshaped,
    "cut_off": _cut_off,
    "one_way": _one_way,
    "stops": _stops,
    "silence": _silence,
    "frozen": _frozen,
    "storm": _storm,
    "evictions": _evictions,
}
