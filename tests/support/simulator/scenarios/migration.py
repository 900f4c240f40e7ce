"""Switches about planned moves (R13): servers that are left, copies, and sessions that are spread anew.

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.scenario import Layout, Scenario, Weather


def drains(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers stop gracefully: for a while they refuse what is new, then they are gone and come back."""
    return replace(scenario, faults=replace(scenario.faults, weights={"drain": 1.0, "drop": 0.3}))


def moves(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers are left as planned, all the time, and while copies run other things happen to them."""
    layout = scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    weights = {"drain": 1.0, "order": 1.0}
    if rng.random() < 0.6:
        weights |= {"drop": rng.choice((0.2, 1.0)), "kill": rng.choice((0.0, 0.5))}
    if rng.random() < 0.3:
        weights |= {"evict": 0.5}
    faults = replace(
        scenario.faults,
        until=rng.uniform(0.5, 2.0),
        gap=rng.choice((0.05, 0.15)),
        weights=weights,
        never_back_chance=0.0,
    )
    load = replace(
        scenario.load,
        prompt=rng.choice(((1, 12), (20, 80))),
        max_tokens=(10, 60),
        turns=rng.randint(1, 3),
        spread=1.0,
    )
    return replace(
        scenario, layout=replace(layout, spans=spans), faults=faults, load=load, patience=20.0
    )


def orders(scenario: Scenario, rng: random.Random) -> Scenario:
    """Nothing but planned moves (R13): sessions go over to copies, and no reader notices."""
    scenario = moves(scenario, rng)
    weather = Weather(latency=scenario.weather.latency, bulk_factor=scenario.weather.bulk_factor)
    faults = replace(scenario.faults, weights={"order": 1.0})
    return replace(scenario, weather=weather, faults=faults)


def rebuilds(scenario: Scenario, rng: random.Random) -> Scenario:
    """Planned moves without copies, while short turns begin and end."""
    scenario = orders(scenario, rng)
    load = replace(scenario.load, max_tokens=(1, 12), turns=4, think=rng.choice((0.0, 0.05)))
    faults = replace(scenario.faults, gap=0.03)
    return replace(scenario, load=load, faults=faults, copy_tries=0)


def rebalances(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers come late beside equals that have all sessions: these are spread, whatever else happens."""
    layout = _draw_twins(scenario.layout, rng)
    weights = {"meddle": 1.0, "kill": rng.choice((0.0, 0.02)), "drop": rng.choice((0.0, 0.02))}
    most = rng.choice((2, 6, 20))
    if rng.random() < 0.3:  # nothing else happens: no reader notices
        weights, most = {"order": 1.0}, 0
    weather = Weather(latency=rng.choice((0.0005, 0.002)), bulk_factor=rng.choice((10.0, 100.0)))
    faults = replace(
        scenario.faults, weights=weights, most=most, gap=0.03, until=12.0, never_back_chance=0.0
    )
    load = replace(
        scenario.load,
        sessions=rng.randint(6, 14),
        spread=1.0,
        turns=rng.randint(1, 3),
        prompt=rng.choice(((1, 12), (20, 80))),
        max_tokens=(20, 150),
        slow_reader_chance=0.9,
        read_pause=rng.choice((0.03, 0.06)),
        quit_chance=0.0,
    )
    return replace(
        scenario,
        layout=layout,
        weather=weather,
        faults=faults,
        load=load,
        rebalance_seconds=rng.choice((0.05, 1.0)),
        patience=20.0,
    )


def _draw_twins(layout: Layout, rng: random.Random) -> Layout:
    """Two or three servers of every span, all but the first of them late. Over a slow bulk lane, small windows would
    take longer over what is rebuilt than any deadline."""
    return replace(
        layout,
        spans=tuple(dict.fromkeys(layout.spans)) * rng.choice((2, 2, 3)),
        max_length=600,
        row_window=max(layout.row_window, 64),
        late=rng.uniform(0.5, 2.0),
        gateways=rng.choice((1, 1, 2)),
    )
