"""What a seed means: the swarm's shape, its weather, the faults that strike it and what its clients do.

Drawn from the seed and a switch, which names the kind of trouble that is concentrated on. Plain values only.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class Layout:
    """The servers and their sizes."""

    n_blocks: int
    spans: tuple[tuple[int, int], ...]  # one entry per server
    page_size: int
    total_pages: int
    max_length: int
    token_budget: int
    row_window: int
    input_tokens: int = 8192  # most entries per Input message ...
    short_input: int = 256  # ... and up to how many go on the live lane
    grant_seconds: float = NEVER
    lease_seconds: float = NEVER


@dataclass(frozen=True, slots=True)
class Weather:
    """How messages travel and steps run; seconds."""

    latency: float = 0.0005  # mean, exponential
    bulk_factor: float = 1.0  # how much slower the bulk lane is
    spike_chance: float = 0.0  # of one message being late by `spike`
    spike: float = 0.2
    duplicate_chance: float = 0.0
    duplicate_delay: float = 0.01
    step: float = 0.001
    slow_step_chance: float = 0.0
    slow_step: float = 0.5
    failed_step_chance: float = 0.0
    notice: float = 0.003  # mean time until a side hears that a link broke
    late_notice_chance: float = 0.2  # ... of one side hearing it `late_notice` later
    late_notice: float = 0.3


@dataclass(frozen=True, slots=True)
class Faults:
    """When trouble strikes, and of which kind (relative weights)."""

    until: float = 0.0  # none after this
    most: int = 1_000_000  # this many at most
    gap: float = 0.05  # mean seconds between faults
    burst_chance: float = 0.3  # of another one right after a fault: inside the loop
    burst_gap: float = 0.002
    weights: dict[str, float] = field(default_factory=dict)  # by name, see faults.py
    restart: float = 0.05  # mean seconds until a killed server is back
    never_back_chance: float = 0.0  # of a killed server with a living twin staying dead


@dataclass(frozen=True, slots=True)
class Load:
    sessions: int = 5
    spread: float = 0.3  # sessions start within this many seconds
    turns: int = 2
    prompt: tuple[int, int] = (1, 12)
    max_tokens: tuple[int, int] = (1, 16)
    to_the_end_chance: float = 0.03  # of max_tokens None
    think: float = 0.02
    rewind_chance: float = 0.2
    stop_chance: float = 0.1
    close_chance: float = 0.1
    eos_chance: float = 0.2
    sampled_chance: float = 0.5
    slow_reader_chance: float = 0.1
    read_pause: float = 0.01


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    switch: str
    layout: Layout
    weather: Weather
    faults: Faults
    load: Load
    fenced_seconds: float = NEVER  # the gateway core's patience with a silent hop
    patience: float = 30.0  # a session without progress for so long after the last fault is stuck
    vocab: int = 4093


SWITCHES = (
    "calm",
    "mixed",
    "drops",
    "kills",
    "duplicates",
    "delays",
    "tight",
    "stalls",
    "prefill",
    "loop",
    "sparse",
    "late",
    "rewinds",
    "slow_bulk",
    "slow_readers",
    "failures",
    "ragged",
    "partition",
    "deadlines",
    "drains",
    "gateways",
)


def draw(seed: int, switch: str = "mixed") -> Scenario:
    """The scenario of a seed: the same for the same (seed, switch), always."""
    if switch not in SWITCHES:
        raise ValueError(f"unknown switch {switch!r}; one of {', '.join(SWITCHES)}")
    rng = random.Random(f"scenario/{switch}/{seed}")
    scenario = Scenario(
        seed, switch, _draw_layout(rng), _draw_weather(rng), _draw_faults(rng), _draw_load(rng)
    )
    return _concentrate(scenario, rng)


def _draw_layout(rng: random.Random, ragged: bool | None = None) -> Layout:
    hops = rng.choice((1, 2, 2, 3, 3, 4))
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
        weights={"drop": 1.0, "kill": 0.5, "freeze": 0.1},
        restart=rng.choice((0.01, 0.05, 0.3)),
        never_back_chance=rng.choice((0.0, 0.3)),
    )


def _draw_load(rng: random.Random) -> Load:
    return Load(sessions=rng.randint(2, 8), turns=rng.randint(1, 4))


def _concentrate(scenario: Scenario, rng: random.Random) -> Scenario:
    """Turn the switch: more of one kind of trouble, less of the others."""
    change = _CONCENTRATIONS.get(scenario.switch)
    if change is not None:
        scenario = change(scenario, rng)
    layout = scenario.layout
    if scenario.weather.duplicate_chance and layout.grant_seconds == NEVER:
        # a repeated create may open a hop that nobody asked for; all others are closed, or freed by Live
        return replace(scenario, layout=replace(layout, grant_seconds=5.0))
    return scenario


def _calm(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        weather=Weather(latency=scenario.weather.latency),
        faults=Faults(),
        load=replace(scenario.load, close_chance=0.0),
    )


def _only(**weights: float) -> dict[str, float]:
    return dict(weights)


def _drops(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, faults=replace(scenario.faults, weights=_only(drop=1.0), gap=0.02))


def _kills(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, faults=replace(scenario.faults, weights=_only(kill=1.0), gap=0.04))


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
    layout = scenario.layout
    longest = -(-80 // layout.page_size)
    pages = int(longest * rng.choice((1.3, 2.0, 3.0))) + 1
    load = replace(scenario.load, sessions=rng.randint(4, 10), prompt=(1, 20), max_tokens=(1, 20))
    return replace(
        scenario,
        layout=replace(layout, total_pages=pages, max_length=200),
        load=replace(load, turns=rng.randint(1, 2), to_the_end_chance=0.0),
        faults=replace(scenario.faults, weights=_only(drop=1.0, kill=0.5)),
    )


def _stalls(scenario: Scenario, rng: random.Random) -> Scenario:
    weather = replace(scenario.weather, slow_step_chance=0.02, slow_step=rng.choice((0.05, 0.5)))
    weights = _only(drop=1.0, freeze=1.0, kill=0.2)
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
        weights=_only(drop=1.0, kill=0.4),
    )
    load = replace(scenario.load, spread=0.05, max_tokens=(8, 30), turns=rng.randint(1, 3))
    return replace(scenario, faults=faults, load=load)


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
    faults = replace(scenario.faults, gap=0.1, weights=_only(drop=1.0), until=1.0)
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
        faults=replace(scenario.faults, weights=_only(drop=0.5, kill=0.2, partition=1.0)),
    )


def _deadlines(scenario: Scenario, rng: random.Random) -> Scenario:
    """All patience is short: hops are given up while they live, grants and leases end too early."""
    layout = replace(
        scenario.layout,
        grant_seconds=rng.choice((0.05, 0.3, 5.0)),
        lease_seconds=rng.choice((0.02, 0.2, 5.0)),
    )
    faults = replace(scenario.faults, weights=_only(drop=1.0, freeze=1.0, kill=0.3))
    weather = replace(scenario.weather, spike_chance=0.01, spike=0.3, slow_step_chance=0.01)
    fenced = rng.choice((0.02, 0.1, 0.5))
    return replace(scenario, layout=layout, faults=faults, weather=weather, fenced_seconds=fenced)


def _drains(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers stop gracefully: for a while they refuse what is new, then they are gone and come back."""
    return replace(scenario, faults=replace(scenario.faults, weights=_only(drain=1.0, drop=0.3)))


def _gateways(scenario: Scenario, rng: random.Random) -> Scenario:
    """The gateway is killed, its clients lose their sessions, another one starts with new ones."""
    faults = replace(
        scenario.faults, gap=0.1, weights=_only(gateway=0.5, drop=1.0, kill=0.3), most=20
    )
    layout = replace(scenario.layout, lease_seconds=rng.choice((0.1, 1.0, 2.0)))
    return replace(scenario, layout=layout, faults=faults)


_CONCENTRATIONS = {
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
    "ragged": _ragged,
    "partition": _partition,
    "deadlines": _deadlines,
    "drains": _drains,
    "gateways": _gateways,
}
