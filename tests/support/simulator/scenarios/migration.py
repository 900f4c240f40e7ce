"""Scenarios of migration (R13, migration): drained servers, KV copies, and rebalanced sessions.

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.scenario import Conditions, Layout, Scenario


def drains(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers stop gracefully: for a while they refuse new hops, then they exit and restart."""
    return replace(
        scenario, faults=replace(scenario.faults, weights={"drain": 1.0, "drop_link": 0.3})
    )


def moves(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers are drained again and again, with faults while copies run."""
    layout = scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    weights = {"drain": 1.0, "drain_request": 1.0}
    if rng.random() < 0.6:
        weights |= {"drop_link": rng.choice((0.2, 1.0)), "kill": rng.choice((0.0, 0.5))}
    if rng.random() < 0.3:
        weights |= {"evict": 0.5}
    faults = replace(
        scenario.faults,
        until=rng.uniform(0.5, 2.0),
        mean_gap=rng.choice((0.05, 0.15)),
        weights=weights,
        permanent_chance=0.0,
    )
    load = replace(
        scenario.load,
        prompt=rng.choice(((1, 12), (20, 80))),
        max_tokens=(10, 60),
        turns=rng.randint(1, 3),
        start_seconds=1.0,
    )
    return replace(
        scenario,
        layout=replace(layout, spans=spans),
        faults=faults,
        load=load,
        max_wait_seconds=20.0,
    )


def orders(scenario: Scenario, rng: random.Random) -> Scenario:
    """Drains without any fault: sessions cut over to copies, and no client notices."""
    scenario = moves(scenario, rng)
    conditions = Conditions(
        latency=scenario.conditions.latency, bulk_factor=scenario.conditions.bulk_factor
    )
    faults = replace(scenario.faults, weights={"drain_request": 1.0})
    return replace(scenario, conditions=conditions, faults=faults)


def rebuilds(scenario: Scenario, rng: random.Random) -> Scenario:
    """Drains without KV copies, while short turns begin and end."""
    scenario = orders(scenario, rng)
    load = replace(
        scenario.load, max_tokens=(1, 12), turns=4, think_seconds=rng.choice((0.0, 0.05))
    )
    faults = replace(scenario.faults, mean_gap=0.03)
    return replace(scenario, load=load, faults=faults, copy_attempts=0)


def rewound_copies(scenario: Scenario, rng: random.Random) -> Scenario:
    """Short turns that rewind follow each other while KV is read for copies, in steps that take long."""
    scenario = moves(scenario, rng)
    conditions = Conditions(
        latency=scenario.conditions.latency, step_seconds=rng.choice((0.005, 0.02))
    )
    faults = replace(scenario.faults, weights={"drain_request": 1.0}, mean_gap=0.05)
    load = replace(
        scenario.load,
        sessions=rng.randint(2, 4),
        prompt=(20, 60),
        max_tokens=(2, 12),
        turns=6,
        stop_chance=0.5,
        rewind_chance=0.9,
        think_seconds=0.0,
        close_chance=0.0,
    )
    layout = replace(scenario.layout, page_size=rng.choice((1, 2, 4)))
    return replace(scenario, layout=layout, conditions=conditions, faults=faults, load=load)


def rebalances(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers join beside replicas that have all sessions: sessions are rebalanced, in spite of faults."""
    layout = _draw_replicas(scenario.layout, rng)
    weights = {
        "disturb_migration": 1.0,
        "kill": rng.choice((0.0, 0.02)),
        "drop_link": rng.choice((0.0, 0.02)),
    }
    most = rng.choice((2, 6, 20))
    if rng.random() < 0.3:  # no faults: no client notices
        weights, most = {"drain_request": 1.0}, 0
    conditions = Conditions(
        latency=rng.choice((0.0005, 0.002)), bulk_factor=rng.choice((10.0, 100.0))
    )
    faults = replace(
        scenario.faults,
        weights=weights,
        max_count=most,
        mean_gap=0.03,
        until=12.0,
        permanent_chance=0.0,
    )
    load = replace(
        scenario.load,
        sessions=rng.randint(6, 14),
        start_seconds=1.0,
        turns=rng.randint(1, 3),
        prompt=rng.choice(((1, 12), (20, 80))),
        max_tokens=(20, 150),
        slow_reader_chance=0.9,
        read_seconds=rng.choice((0.03, 0.06)),
        quit_chance=0.0,
    )
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=faults,
        load=load,
        rebalance_after_seconds=rng.choice((0.05, 1.0)),
        max_wait_seconds=20.0,
    )


def _draw_replicas(layout: Layout, rng: random.Random) -> Layout:
    """Return a layout with two or three servers of each span, all but the first announced late.

    Small windows would take longer for a replay over a slow bulk lane than any deadline.
    """
    return replace(
        layout,
        spans=tuple(dict.fromkeys(layout.spans)) * rng.choice((2, 2, 3)),
        max_length=600,
        row_window=max(layout.row_window, 64),
        announce_seconds=rng.uniform(0.5, 2.0),
        gateways=rng.choice((1, 1, 2)),
    )
