"""Draws scenarios from seeds. The name of a scenario is the kind of trouble that its worlds have more of.

Used by tests and by the command line. A new scenario is a function and a line in `SCENARIOS`. A change of the order of
draws changes the worlds of all seeds, those of regression tests too.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from support.simulator.actors.server_process import ROW_BYTES
from support.simulator.scenario import NEVER, Conditions, Faults, Layout, Load, Scenario
from support.simulator.scenarios import detection, gateways, isolation, migration

from modelswarm_gateway.core.interface.settings import GatewaySettings


def draw(seed: int, name: str = "mixed") -> Scenario:
    """Return the world of a seed; the same for the same (seed, name)."""
    rng = random.Random(f"scenario/{name}/{seed}")
    scenario = Scenario(
        seed, name, _draw_layout(rng), _draw_conditions(rng), _draw_faults(rng), _draw_load(rng)
    )
    return _limit_in_flight(_apply(scenario, rng))


# Scenarios in which few rows may be in flight in some worlds.
LIMITED_IN_FLIGHT = (
    *("kills", "tight", "prefill", "loop", "sparse", "rewinds", "long", "evictions", "storm"),
    "forced",
)


def _limit_in_flight(scenario: Scenario) -> Scenario:
    """Let only the rows of few sessions, or of none, be in flight at a time.

    Not with a slow bulk lane, where one row at a time would take longer than any deadline. Not where the scenario
    limits a lane's bytes itself (`bursts`): that limit follows from its own bytes in flight.
    """
    conditions = scenario.conditions
    is_slow = conditions.bulk_factor > 10 or conditions.latency * conditions.bulk_factor > 0.1
    if scenario.name not in LIMITED_IN_FLIGHT or is_slow or conditions.max_lane_bytes < NEVER:
        return scenario
    rng = random.Random(f"narrow/{scenario.name}/{scenario.seed}")
    rows = rng.choice((4 << 20, 16, 0))
    layout = replace(scenario.layout, in_flight_bytes=rows * ROW_BYTES)
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
        max_input_tokens=rng.choice((3, 16, 8192)),
        max_live_input_tokens=rng.choice((0, 4, 256)),
    )


def _draw_conditions(rng: random.Random) -> Conditions:
    return Conditions(
        latency=rng.choice((0.0002, 0.0005, 0.002)),
        bulk_factor=rng.choice((1.0, 1.0, 3.0, 10.0)),
        spike_chance=rng.choice((0.0, 0.0, 0.005)),
        duplicate_chance=rng.choice((0.0, 0.02)),
        slow_step_chance=rng.choice((0.0, 0.0, 0.002)),
        slow_link_down_chance=rng.choice((0.0, 0.2, 0.5)),
    )


def _draw_faults(rng: random.Random) -> Faults:
    return Faults(
        until=rng.uniform(0.3, 1.2),
        mean_gap=rng.choice((0.02, 0.05, 0.15)),
        weights={"drop_link": 1.0, "kill": 0.5},
        restart_seconds=rng.choice((0.01, 0.05, 0.3)),
        permanent_chance=rng.choice((0.0, 0.3)),
    )


def _draw_load(rng: random.Random) -> Load:
    return Load(sessions=rng.randint(2, 8), turns=rng.randint(1, 4))


def _apply(scenario: Scenario, rng: random.Random) -> Scenario:
    """Apply the scenario's function, and the limits that follow from the kinds of faults."""
    scenario = SCENARIOS[scenario.name](scenario, rng)
    if not scenario.has_silent_faults:  # a session that needs a deadline has stalled
        scenario = replace(scenario, token_timeout_seconds=5.0, fence_ack_seconds=1.0)
    elif scenario.fence_timeout_seconds == NEVER and rng.random() < 0.7:
        scenario = replace(scenario, fence_timeout_seconds=GatewaySettings().fence_timeout_seconds)
    layout = scenario.layout
    if scenario.conditions.duplicate_chance and layout.grant_seconds == NEVER:
        # A repeated create may open a hop that no gateway knows; only its grant frees it.
        return replace(scenario, layout=replace(layout, grant_seconds=5.0))
    return scenario


def _mixed(scenario: Scenario, rng: random.Random) -> Scenario:
    """A little of everything."""
    weights = {"drop_link": 1.0, "kill": 0.5, "freeze": 0.1, "drain": 0.1, "evict": 0.1}
    return replace(scenario, faults=replace(scenario.faults, weights=weights))


def _calm(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        conditions=Conditions(latency=scenario.conditions.latency),
        faults=Faults(),
        load=replace(scenario.load, close_chance=0.0),
    )


def _drops(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario, faults=replace(scenario.faults, weights={"drop_link": 1.0}, mean_gap=0.02)
    )


def _kills(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(scenario, faults=replace(scenario.faults, weights={"kill": 1.0}, mean_gap=0.04))


def _duplicates(scenario: Scenario, rng: random.Random) -> Scenario:
    conditions = replace(
        scenario.conditions,
        duplicate_chance=rng.choice((0.05, 0.3)),
        duplicate_delay=rng.choice((0.001, 0.02, 0.1)),
    )
    return replace(scenario, conditions=conditions, faults=replace(scenario.faults, mean_gap=0.1))


def _delays(scenario: Scenario, rng: random.Random) -> Scenario:
    conditions = replace(scenario.conditions, spike_chance=0.02, spike=rng.choice((0.02, 0.1, 0.6)))
    return replace(scenario, conditions=conditions)


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
            think_seconds=rng.choice((0.02, 0.1)),
            quit_chance=0.3,
            no_limit_chance=0.0,
        ),
        faults=replace(scenario.faults, weights={"drop_link": 1.0, "kill": 1.0}),
    )


def _stalls(scenario: Scenario, rng: random.Random) -> Scenario:
    conditions = replace(
        scenario.conditions, slow_step_chance=0.02, slow_step=rng.choice((0.05, 0.5))
    )
    weights = {"drop_link": 1.0, "freeze": 1.0, "kill": 0.2}
    return replace(
        scenario, conditions=conditions, faults=replace(scenario.faults, weights=weights)
    )


def _prefill(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        layout=replace(scenario.layout, token_budget=rng.choice((2, 3, 5))),
        load=replace(scenario.load, prompt=(20, 60), max_tokens=(1, 6), rewind_chance=0.1),
        faults=replace(scenario.faults, mean_gap=0.02),
    )


def _loop(scenario: Scenario, rng: random.Random) -> Scenario:
    faults = replace(
        scenario.faults,
        mean_gap=0.1,
        burst_chance=0.8,
        burst_gap=rng.choice((0.0005, 0.002, 0.005)),
    )
    return replace(scenario, faults=faults)


def _sparse(scenario: Scenario, rng: random.Random) -> Scenario:
    """Few faults, so that no later one ends by chance a stall that an earlier one caused."""
    faults = replace(
        scenario.faults,
        max_count=rng.randint(1, 3),
        mean_gap=rng.uniform(0.01, 0.1),
        burst_gap=rng.choice((0.0005, 0.002, 0.01)),
        weights={"drop_link": 1.0, "kill": 0.4},
    )
    load = replace(scenario.load, start_seconds=0.05, max_tokens=(8, 30), turns=rng.randint(1, 3))
    return replace(scenario, faults=faults, load=load, max_wait_seconds=4.0)


def _late(scenario: Scenario, rng: random.Random) -> Scenario:
    """Turns follow each other faster than messages travel, so many messages are of an older epoch."""
    conditions = replace(
        scenario.conditions,
        latency=rng.choice((0.002, 0.01)),
        bulk_factor=rng.choice((0.3, 1.0, 5.0)),
        spike_chance=0.03,
        spike=0.05,
        step_seconds=0.0005,
    )
    faults = replace(scenario.faults, mean_gap=0.1, weights={"drop_link": 1.0}, until=1.0)
    load = replace(
        scenario.load,
        turns=rng.randint(4, 8),
        rewind_chance=0.7,
        stop_chance=0.6,
        think_seconds=rng.choice((0.0, 0.0, 0.05)),
        prompt=(1, 6),
        max_tokens=(1, 12),
    )
    return replace(scenario, conditions=conditions, faults=faults, load=load)


def _rewinds(scenario: Scenario, rng: random.Random) -> Scenario:
    load = replace(
        scenario.load,
        turns=rng.randint(3, 6),
        rewind_chance=0.7,
        stop_chance=0.3,
        think_seconds=rng.choice((0.0, 0.0, 0.02)),
        max_tokens=(0, 12),
    )
    return replace(scenario, load=load)


def _slow_bulk(scenario: Scenario, rng: random.Random) -> Scenario:
    conditions = replace(scenario.conditions, bulk_factor=rng.choice((30.0, 100.0)))
    return replace(scenario, conditions=conditions, load=replace(scenario.load, prompt=(2, 30)))


def _slow_readers(scenario: Scenario, rng: random.Random) -> Scenario:
    load = replace(scenario.load, slow_reader_chance=1.0, read_seconds=rng.choice((0.003, 0.02)))
    return replace(scenario, load=load)


def _failures(scenario: Scenario, rng: random.Random) -> Scenario:
    return replace(
        scenario,
        conditions=replace(scenario.conditions, failed_step_chance=0.01),
        faults=replace(scenario.faults, mean_gap=0.2),
    )


def _ragged(scenario: Scenario, rng: random.Random) -> Scenario:
    layout = _draw_layout(rng, ragged=True)
    return replace(scenario, layout=layout)


def _extinction(scenario: Scenario, rng: random.Random) -> Scenario:
    """A block loses all its servers for good: sessions end with an error, new turns are refused."""
    weights = {"drop_link": 1.0, "kill": 0.5, "kill_block": 0.1}
    load = replace(scenario.load, quit_chance=0.5)
    faults = replace(scenario.faults, weights=weights)
    return replace(
        scenario,
        load=load,
        faults=faults,
        hold_limit_seconds=rng.choice((0.3, 2.0)),
        max_starvation_seconds=NEVER,
    )


def _long(scenario: Scenario, rng: random.Random) -> Scenario:
    """Routes of four and five hops."""
    return replace(scenario, layout=_draw_layout(rng, ragged=rng.random() < 0.3, lengths=(4, 5, 5)))


def _reshaped(scenario: Scenario, rng: random.Random) -> Scenario:
    """Killed servers restart with other blocks, so boundaries change under the sessions."""
    layout = _draw_layout(rng, ragged=True, lengths=(1, 2, 3, 4, 5))
    faults = replace(
        scenario.faults, weights={"kill": 1.0, "drop_link": 0.5}, new_span_chance=0.7, mean_gap=0.05
    )
    return replace(scenario, layout=layout, faults=faults)


def _storm(scenario: Scenario, rng: random.Random) -> Scenario:
    """All kinds of faults at once, on routes of any length."""
    layout = _draw_layout(rng, lengths=(1, 2, 3, 4, 5))
    layout = replace(
        layout,
        spans=layout.spans + tuple(dict.fromkeys(layout.spans)),
        total_pages=rng.choice((160, 400, 4096)) // layout.page_size + 1,
        lease_seconds=rng.choice((0.5, 2.0)),
        gateways=rng.choice((1, 1, 2)),
    )
    weights = dict.fromkeys(
        ("drop_link", "kill", "freeze", "stop", "stop_gateway", "delay_direction"), 1.0
    )
    weights["stop_long"] = 1.0
    weights |= {"partition": 0.3, "cut_off": 0.3, "drain": 0.5}
    faults = replace(
        scenario.faults,
        weights=weights,
        new_span_chance=rng.choice((0.0, 0.5)),
        mean_gap=0.03,
        burst_chance=0.5,
    )
    load = replace(scenario.load, rewind_chance=0.4, no_limit_chance=0.0, max_tokens=(0, 16))
    return replace(scenario, layout=layout, faults=faults, load=load, max_wait_seconds=40.0)


def _evictions(scenario: Scenario, rng: random.Random) -> Scenario:
    """Retained rows are evicted at any time, for there is memory for few sessions or for none."""
    rows = rng.choice((0, 20, 60, 200, 1000))
    load = replace(scenario.load, sessions=rng.randint(4, 10), prompt=(5, 40), start_seconds=0.1)
    faults = replace(scenario.faults, mean_gap=0.03, weights={"drop_link": 0.5, "kill": 1.0})
    if rng.random() < 0.5:
        scenario = replace(scenario, layout=_draw_layout(rng, lengths=(3, 4, 5)))
    layout = replace(scenario.layout, replay_bytes=rows * 60)
    conditions = scenario.conditions
    if rng.random() < 0.5:  # ... or right between the FenceAck that lists them and the plan
        layout = scenario.layout
        conditions = replace(conditions, evict_chance=rng.choice((0.05, 0.3, 1.0)))
        faults = replace(faults, weights={**faults.weights, "evict": rng.choice((0.5, 3.0))})
    return replace(scenario, layout=layout, load=load, faults=faults, conditions=conditions)


RULED = (
    *("gateways", "kills", "rewinds", "orders", "orders", "orders", "orders"),
    *("adoptions", "adoptions", "doomed"),
)


def _rules(scenario: Scenario, rng: random.Random) -> Scenario:
    """Sampling rules, grammars and logprobs of turns that are replayed, migrated, taken over and resumed."""
    kind = rng.choice(RULED)
    scenario = SCENARIOS[kind](scenario, rng)
    load = replace(
        scenario.load,
        has_rules=True,
        has_grammars=kind == "orders" or rng.random() < 0.5,
        resumes_turns=True,
        sampled_chance=0.8,
        turns=rng.randint(2, 4),
    )
    if kind == "orders":  # few sessions, whose turns last until their tails have migrated
        load = replace(load, sessions=2, slow_reader_chance=0.9, read_seconds=0.03)
        load = replace(load, max_tokens=(20, 40), eos_chance=0.0)
    return replace(scenario, load=load)


FORKED = (
    *("mixed", "kills", "rewinds", "late", "duplicates", "loop", "tight", "evictions", "failures"),
    *("prefill", "stalls", "moves", "drains", "gateways", "adoptions", "slow_readers", "reshaped"),
)


OVER_OTHERS = ("forced", "families", "rows", "block_rows", "reserved")  # scenarios over other kinds


def _families(scenario: Scenario, rng: random.Random) -> Scenario:
    """Sessions are forked while anything of other scenarios happens; a step copies everything or a position."""
    scenario = SCENARIOS[rng.choice(FORKED)](scenario, rng)
    load = replace(scenario.load, fork_chance=rng.choice((0.05, 0.2)), max_sessions=24)
    layout = replace(scenario.layout, fork_step_bytes=rng.choice((1, 1, 200, 8 << 20)))
    return replace(scenario, load=load, layout=layout)


WITH_ROWS = (
    *("mixed", "kills", "rewinds", "late", "duplicates", "loop", "evictions", "failures", "stalls"),
    *("prefill", "moves", "drains", "orders", "slow_readers", "reshaped"),
    *("adoptions", "adoptions", "adoptions", "successors", "doomed"),
)


def _rows(scenario: Scenario, rng: random.Random) -> Scenario:
    """Opaque rows in inputs and answers, and sessions of a block range, in worlds of other kinds."""
    scenario = SCENARIOS[rng.choice(WITH_ROWS)](scenario, rng)
    return replace(scenario, load=replace(scenario.load, has_rows=True))


WITH_BLOCK_ROWS = (
    *("families", "orders", "prefill", "doomed", "adoptions", "moves", "duplicates", "orders"),
    *("evictions", "late", "families", "loop", "drains", "rewinds", "slow_readers", "kills"),
    *("failures", "orders", "kills", "reshaped", "successors", "moves", "stalls", "adoptions"),
)


def _block_rows(scenario: Scenario, rng: random.Random) -> Scenario:
    """Logs begin with rows for each block, on routes of up to five hops, in worlds of other kinds."""
    layout = _draw_layout(rng, lengths=(1, 2, 3, 3, 4, 5))
    scenario = SCENARIOS[rng.choice(WITH_BLOCK_ROWS)](replace(scenario, layout=layout), rng)
    return replace(scenario, load=replace(scenario.load, has_block_rows=True))


def _forced(scenario: Scenario, rng: random.Random) -> Scenario:
    """Grammars whose forced tokens travel in groups, in worlds of any other kind."""
    kind = rng.choice([name for name in SCENARIOS if name not in OVER_OTHERS])
    scenario = SCENARIOS[kind](scenario, rng)
    return replace(scenario, load=replace(scenario.load, has_grammars=True))


RESERVED = (
    *("tight", "kills", "rewinds", "moves", "orders", "drains", "evictions", "families", "loop"),
    *("rebalances", "reshaped", "adoptions", "doomed", "successors", "adoptions"),
    *("moves", "orders"),
)


def _reserved(scenario: Scenario, rng: random.Random) -> Scenario:
    """Sessions reserve all their positions, in worlds of other kinds with room for few sessions."""
    scenario = SCENARIOS[rng.choice(RESERVED)](scenario, rng)
    layout, length = scenario.layout, rng.choice((40, 120))
    pages = -(-length // layout.page_size) * rng.choice((1.3, 2.0, 3.0, 6.0))
    layout = replace(layout, max_length=length, total_pages=int(pages) + 1)
    load = replace(scenario.load, reserves=True, slow_reader_chance=0.5)
    return replace(scenario, layout=layout, load=load, kept_leases=1.0)


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
    "jam": isolation.jam,
    "ragged": _ragged,
    "partition": detection.partition,
    "deadlines": detection.deadlines,
    "drains": migration.drains,
    "moves": migration.moves,
    "orders": migration.orders,
    "rewound_copies": migration.rewound_copies,
    "rebuilds": migration.rebuilds,
    "rebalances": migration.rebalances,
    "gateways": gateways.gateways,
    "extinction": _extinction,
    "adoptions": gateways.adoptions,
    "asleep": gateways.asleep,
    "doomed": gateways.doomed,
    "successors": gateways.successors,
    "rivals": gateways.rivals,
    "islands": gateways.islands,
    "detours": gateways.detours,
    "returns": gateways.returns,
    "handover": gateways.handover,
    "long": _long,
    "reshaped": _reshaped,
    "cut_off": detection.cut_off,
    "one_way": detection.one_way,
    "stops": detection.stops,
    "silence": detection.silence,
    "frozen": detection.frozen,
    "storm": _storm,
    "evictions": _evictions,
    "rules": _rules,
    "forced": _forced,
    "families": _families,
    "rows": _rows,
    "block_rows": _block_rows,
    "reserved": _reserved,
}
