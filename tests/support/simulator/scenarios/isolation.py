"""Scenarios of one session, or many at once, that must not harm the others (I7, isolation).

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.actors.server_process import ROW_BYTES
from support.simulator.scenario import Conditions, Faults, Scenario

from modelswarm_serving.core.flow.flow_control import MIN_WINDOW_DIVISOR


def poison(scenario: Scenario, rng: random.Random) -> Scenario:
    """Only steps with certain sessions fail: all other sessions must notice nothing."""
    sessions = rng.randint(4, 10)
    load = replace(
        scenario.load,
        sessions=sessions,
        start_seconds=rng.choice((0.02, 0.3)),
        max_tokens=(8, 40),
        poisoned=rng.randint(1, sessions // 2),
        poison_chance=rng.choice((0.05, 0.3, 1.0)),
    )
    conditions = Conditions(
        latency=scenario.conditions.latency, bulk_factor=scenario.conditions.bulk_factor
    )
    return replace(scenario, conditions=conditions, faults=Faults(), load=load)


def bursts(scenario: Scenario, rng: random.Random) -> Scenario:
    """Many sessions lose a span at once and are replayed over one slow link.

    Its lanes end at eight times the bytes that a server lets be in flight, as real ones do: 256 MiB of 32 MiB.
    """
    in_flight = rng.choice((8, 32)) * ROW_BYTES
    sessions = rng.randint(8, 20)
    layout = replace(
        scenario.layout,
        spans=tuple(dict.fromkeys(scenario.layout.spans)) * 2,
        row_window=rng.choice((64, 1024)),
        max_length=600,
        in_flight_bytes=in_flight,
    )
    least = (
        layout.row_window // MIN_WINDOW_DIVISOR * ROW_BYTES
    )  # that each hop may have in flight in any case
    conditions = Conditions(
        latency=rng.choice((0.0005, 0.002)),
        bulk_factor=rng.choice((3.0, 10.0)),
        max_lane_bytes=8 * in_flight + 2 * sessions * least,
    )
    faults = replace(
        scenario.faults, weights={"kill": 1.0}, mean_gap=0.3, max_count=rng.randint(1, 4), until=2.0
    )
    load = replace(
        scenario.load,
        sessions=sessions,
        start_seconds=rng.choice((0.02, 0.3)),
        turns=1,
        prompt=(40, 120),
        max_tokens=(5, 30),
    )
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=faults,
        load=load,
        max_wait_seconds=20.0,
    )
