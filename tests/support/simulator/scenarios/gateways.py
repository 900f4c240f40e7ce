"""Switches about gateways that die, sleep and take over from each other (R19, R20).

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.scenario import Scenario


def gateways(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways share servers and are killed; their clients lose their sessions, others start with new ones."""
    faults = replace(
        scenario.faults, gap=0.1, weights={"gateway": 0.5, "drop": 1.0, "kill": 0.3}, most=20
    )
    layout = replace(scenario.layout, lease_seconds=rng.choice((0.1, 1.0, 2.0)))
    layout = replace(layout, gateways=rng.choice((1, 2)))
    if rng.random() < 0.5:  # full of what the old gateway left
        layout = replace(layout, total_pages=120 // layout.page_size + 1)
    load = replace(scenario.load, to_the_end_chance=0.0)
    return replace(scenario, layout=layout, faults=faults, load=load)


def adoptions(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways die, and other gateways take over their sessions from what the servers have of them."""
    layout = replace(scenario.layout, gateways=2, lease_seconds=rng.choice((0.6, 1.0, 2.0)))
    weights = {"gateway": 1.0, "drop": rng.choice((0.0, 1.0)), "kill": rng.choice((0.0, 0.3))}
    faults = replace(scenario.faults, gap=0.3, weights=weights, most=6, until=1.5)
    load = replace(scenario.load, turns=rng.randint(2, 5), think=0.1, to_the_end_chance=0.0)
    return replace(scenario, layout=layout, faults=faults, load=load, adopts=True, patience=20.0)


def doomed(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways die in the midst of their fences: all that clients have read is found all the same."""
    scenario = adoptions(scenario, rng)
    weather = replace(scenario.weather, spike_chance=0.0, slow_step_chance=0.0)
    weights = {"doom": 1.0, "gateway": 0.2}
    faults = replace(scenario.faults, weights=weights, gap=0.1, most=12, until=3.0)
    return replace(scenario, faults=faults, weather=weather, patience=30.0)


def asleep(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways stand still while others take their sessions over, and go on with what they believe to be theirs."""
    scenario = adoptions(scenario, rng)
    weather, layout = scenario.weather, scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    layout = replace(layout, spans=spans, max_length=600)
    weights = {"sleep": 1.0}
    others = rng.choice(("none", "exile", "all"))
    if others != "all":
        weather = replace(weather, spike_chance=0.0, slow_step_chance=0.0)
    if others != "none":
        weights["exile"] = 3.0
    if others == "all":
        weights |= {kind: rng.choice((0.0, 0.5)) for kind in ("drop", "kill", "order")}
    faults = replace(scenario.faults, weights=weights, gap=0.1, most=8, until=5.0)
    load = replace(
        scenario.load,
        max_tokens=(20, 80),
        slow_reader_chance=0.7,
        read_pause=rng.choice((0.02, 0.05)),
        quit_chance=0.0,
    )
    return replace(
        scenario, layout=layout, weather=weather, faults=faults, load=load, patience=30.0
    )
