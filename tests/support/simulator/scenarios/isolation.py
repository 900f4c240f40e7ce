"""Switches about what one session, or many at once, may not do to the others (I7).

Used by `base.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from support.simulator.actors.server_process import ROW_BYTES
from support.simulator.scenario import Faults, Scenario, Weather

from modelswarm_serving.core.flow.flow_control import MIN_WINDOW_DIVISOR


def poison(scenario: Scenario, rng: random.Random) -> Scenario:
    """Nothing goes wrong but steps that some sessions are in: all others go on as if these were not there."""
    sessions = rng.randint(4, 10)
    load = replace(
        scenario.load,
        sessions=sessions,
        spread=rng.choice((0.02, 0.3)),
        max_tokens=(8, 40),
        poisoned=rng.randint(1, sessions // 2),
        poison_chance=rng.choice((0.05, 0.3, 1.0)),
    )
    weather = Weather(latency=scenario.weather.latency, bulk_factor=scenario.weather.bulk_factor)
    return replace(scenario, weather=weather, faults=Faults(), load=load)


def bursts(scenario: Scenario, rng: random.Random) -> Scenario:
    """Many sessions lose a span at once, and are computed again over one slow link whose lanes end when they are sent
    eight times what a server lets come, as real ones do: 256 MiB, of 32."""
    coming = rng.choice((8, 32)) * ROW_BYTES
    sessions = rng.randint(8, 20)
    layout = replace(
        scenario.layout,
        spans=tuple(dict.fromkeys(scenario.layout.spans)) * 2,
        row_window=rng.choice((64, 1024)),
        max_length=600,
        coming_bytes=coming,
    )
    least = (
        layout.row_window // MIN_WINDOW_DIVISOR * ROW_BYTES
    )  # that each may have coming in any case
    weather = Weather(
        latency=rng.choice((0.0005, 0.002)),
        bulk_factor=rng.choice((3.0, 10.0)),
        lane_bytes=8 * coming + 2 * sessions * least,
    )
    faults = replace(
        scenario.faults, weights={"kill": 1.0}, gap=0.3, most=rng.randint(1, 4), until=2.0
    )
    load = replace(
        scenario.load,
        sessions=sessions,
        spread=rng.choice((0.02, 0.3)),
        turns=1,
        prompt=(40, 120),
        max_tokens=(5, 30),
    )
    return replace(
        scenario, layout=layout, weather=weather, faults=faults, load=load, patience=20.0
    )
