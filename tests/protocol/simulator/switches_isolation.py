"""Switches about what one session, or many at once, may not do to the others (I7).

Used by `switches.py`, which has the list of all.
"""

from __future__ import annotations

import random
from dataclasses import replace

from protocol.simulator.scenario import Faults, Scenario, Weather


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
