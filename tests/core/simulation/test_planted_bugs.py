"""Each planted bug is found within half of its budget of seeds; each regression seed finds its bug."""

from __future__ import annotations

import sys

import pytest
from support.simulator.actors.server_process import Cores
from support.simulator.planted.catalog import (
    LIKELY_SEEDS,
    PLANTS,
    REGRESSIONS,
    Plant,
    first_violation,
)
from support.simulator.planted.protocol import IgnoresGaps
from support.simulator.planted.recovery import CopiesAfterFence
from support.simulator.planted.replay_log import IgnoresHoles
from support.simulator.planted.swap import server_with
from support.simulator.scenarios.base import draw
from support.simulator.world import World, simulate_once

pytestmark = pytest.mark.timeout(3600)  # a bug that took 856 s was found at a load of 17


def tiered(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.full) if PLANTS[name].is_slow else name


@pytest.mark.parametrize("name", [tiered(name) for name in PLANTS])
def test_planted_bug_is_found_in_half_budget(name: str) -> None:
    plant = PLANTS[name]
    seed = plant.finding_seed(LIKELY_SEEDS.get(name, 0))
    sys.stdout.write(f"{name}: seed {seed} of {plant.scenario}, budget {plant.budget}\n")
    assert seed is not None, f"{name}: none of {plant.budget} seeds of {plant.scenario} finds it"
    assert not plant.is_near_budget(seed), (
        f"{name}: found by seed {seed} of {plant.scenario}, beyond half of its budget of {plant.budget} seeds; "
        "raise the budget, or let the scenario cause this kind of fault more often"
    )
    simulate_once(seed, plant.scenario)  # the product passes: the bug was found


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression_seed_finds_its_bug(name: str) -> None:
    regression = REGRESSIONS[name]
    seeds = range(regression.seed, regression.seed + 1)
    found = first_violation(regression.cores, regression.scenario, seeds)
    assert found is not None, f"seed {regression.seed} of {regression.scenario} passes with the bug"


@pytest.mark.parametrize("name", REGRESSIONS)
def test_regression_seed_without_its_bug_passes(name: str) -> None:
    regression = REGRESSIONS[name]
    outcome = World(draw(regression.seed, regression.scenario)).run()
    assert outcome.sessions > 0


def test_gap_check_alone_is_not_needed_with_ordered_lanes() -> None:
    """The gap check of R1 (rows never truncate) matters only with a second planted bug, in R9 (one lane at a time)."""
    assert first_violation(Cores(server=IgnoresGaps), "slow_bulk", range(30)) is None


@pytest.mark.full
def test_copy_that_outlives_its_epoch_is_harmless() -> None:
    """The copy's rows have an epoch unknown to the receiver, or are marked as a copy where none is expected."""
    assert first_violation(Cores(server=CopiesAfterFence), "moves", range(30)) is None


def test_plant_found_beyond_half_budget_is_near_it() -> None:
    plant = Plant(Cores(), "calm", 100)
    assert not plant.is_near_budget(49)
    assert plant.is_near_budget(50)


def test_bug_of_another_part_is_refused() -> None:
    cores = Cores(server=server_with(lambda core: core._scheduler, IgnoresHoles))
    with pytest.raises(TypeError, match="IgnoresHoles does not derive from Scheduler"):
        World(draw(0, "calm"), cores)
