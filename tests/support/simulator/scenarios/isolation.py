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


def jam(scenario: Scenario, rng: random.Random) -> Scenario:
    """Two sessions, one server of each span, and room for one of two long turns: one of them must get it."""
    blocks = rng.randint(2, 4)
    cut = rng.randint(1, blocks - 1)
    layout = replace(
        scenario.layout,
        n_blocks=blocks,
        spans=((0, cut), (cut, blocks)),
        page_size=4,
        total_pages=30,  # 27 for turns: one of the longest takes 16, the KV of the other session at most 10
        max_length=64,
        gateways=2,
    )
    conditions = Conditions(latency=rng.choice((0.02, 0.05)))
    load = replace(
        scenario.load,
        sessions=1,
        start_seconds=0.02,
        turns=5,
        prompt=(1, 4),
        max_tokens=(1, 1),
        no_limit_chance=0.5,
        think_seconds=0.0,
        rewind_chance=0.0,
        quit_chance=0.0,
        close_chance=0.0,
    )
    return replace(
        scenario,
        layout=layout,
        conditions=conditions,
        faults=Faults(),
        load=load,
        max_starvation_seconds=4.0,
    )
