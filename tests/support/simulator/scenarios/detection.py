"""Scenarios of faults that only silence or a deadline shows (R21, failure detection): stops, partitions, one-way links.

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.scenario import NEVER, Scenario

from modelswarm_gateway.core.interface.settings import GatewaySettings


def partition(scenario: Scenario, rng: random.Random) -> Scenario:
    """Pairs of servers are parted for good; a route around them always remains."""
    layout = scenario.layout
    return replace(
        scenario,
        layout=replace(layout, spans=layout.spans + tuple(dict.fromkeys(layout.spans))),
        faults=replace(scenario.faults, weights={"drop_link": 0.5, "kill": 0.2, "partition": 1.0}),
        max_wait_seconds=30.0,  # each parted pair is found by a try
        max_starvation_seconds=30.0,
    )


def deadlines(scenario: Scenario, rng: random.Random) -> Scenario:
    """Short deadlines: hops are given up while their servers run, grants and leases expire early."""
    layout = replace(
        scenario.layout,
        grant_seconds=rng.choice((0.05, 0.3, 5.0)),
        lease_seconds=rng.choice((0.02, 0.2, 5.0)),
    )
    faults = replace(scenario.faults, weights={"drop_link": 1.0, "freeze": 1.0, "kill": 0.3})
    conditions = replace(scenario.conditions, spike_chance=0.01, spike=0.3, slow_step_chance=0.01)
    fenced = rng.choice((0.02, 0.1, 0.5))
    return replace(
        scenario, layout=layout, faults=faults, conditions=conditions, fence_timeout_seconds=fenced
    )


def cut_off(scenario: Scenario, rng: random.Random) -> Scenario:
    """Gateways and servers, and pairs of servers, are parted for good."""
    layout = scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    layout = replace(layout, spans=spans, gateways=rng.choice((1, 2)))
    weights = {"drop_link": 0.5, "kill": 0.2, "cut_off": 1.0, "partition": 0.5}
    if layout.lease_seconds == NEVER:  # frees hops at servers that their gateway cannot reach
        layout = replace(layout, lease_seconds=rng.choice((0.3, 1.0)))
    return replace(
        scenario,
        layout=layout,
        faults=replace(scenario.faults, weights=weights),
        max_wait_seconds=30.0,
        max_starvation_seconds=30.0,
    )


def one_way(scenario: Scenario, rng: random.Random) -> Scenario:
    """One direction of a pair loses everything, and for long no link breaks and nothing is reported.

    A single such pair is found by two deadlines (`link_failures.py`), long before its link breaks; each further one
    doubles them. The first one of a prompt takes up to 4 s where servers have not reported row times yet.
    """
    scenario = cut_off(scenario, rng)
    quiet = replace(scenario.conditions, spike_chance=0.0, slow_step_chance=0.0)
    single = rng.random() < 0.5
    faults = replace(
        scenario.faults,
        weights={"part_linked": 1.0},
        undetected_chance=1.0,
        mean_gap=0.3,
        until=1.5,
        max_count=1 if single else 6,
    )
    load = replace(scenario.load, turns=rng.randint(2, 5), max_tokens=(20, 80))
    return replace(
        scenario,
        conditions=quiet if single else scenario.conditions,
        faults=faults,
        load=load,
        max_overdues=2 if single else NEVER,
        max_wait_seconds=12.5 if single else 30.0,
        max_starvation_seconds=10.0 if single else 30.0,
        fence_timeout_seconds=GatewaySettings().fence_timeout_seconds,
    )


def stops(scenario: Scenario, rng: random.Random) -> Scenario:
    """SIGSTOP of servers and of the gateway, and directions of links that deliver nothing for a while."""
    weights = {
        "stop": 1.0,
        "stop_gateway": 0.3,
        "delay_direction": 1.0,
        "drop_link": 0.3,
        "kill": 0.2,
    }
    return replace(
        scenario,
        faults=replace(scenario.faults, mean_gap=0.1, weights=weights),
        max_wait_seconds=20.0,
    )


def silence(scenario: Scenario, rng: random.Random) -> Scenario:
    """Servers are stopped for long, and directions of links deliver nothing: only silence shows it."""
    layout = scenario.layout
    spans = layout.spans + tuple(dict.fromkeys(layout.spans))
    weights = {
        "stop_long": 1.0,
        "delay_direction": 0.5,
        "stop_gateway": 0.1,
        "drop_link": 0.2,
        "kill": 0.2,
    }
    faults = replace(scenario.faults, mean_gap=0.2, until=2.0, weights=weights)
    load = replace(scenario.load, start_seconds=1.5, turns=rng.randint(2, 5), think_seconds=0.1)
    return replace(
        scenario,
        layout=replace(layout, spans=spans),
        faults=faults,
        load=load,
        max_wait_seconds=20.0,
        fence_timeout_seconds=GatewaySettings().fence_timeout_seconds,
    )


def frozen(scenario: Scenario, rng: random.Random) -> Scenario:
    """One server is stopped for long while others hold its blocks: no session may wait for it."""
    quiet = replace(scenario.conditions, spike_chance=0.0, slow_step_chance=0.0)
    scenario = replace(silence(scenario, rng), conditions=quiet)
    faults = replace(scenario.faults, max_count=1, mean_gap=0.5, weights={"stop_long": 1.0})
    return replace(scenario, faults=faults, max_wait_seconds=3.0)
