"""The simulator would see it: each rule that is switched off on purpose is found within a budget of seeds."""

from __future__ import annotations

import pytest
from support.simulator.actors.server_process import Cores
from support.simulator.planted.protocol import PLANTS, OverlooksGaps
from support.simulator.planted.recovery import CopiesOnAndOn
from support.simulator.scenarios.base import draw
from support.simulator.trace import Violation
from support.simulator.world import World


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_bug_is_found(name: str) -> None:
    plant = PLANTS[name]
    seed = first_violation(plant.cores, plant.switch, plant.seeds)
    assert seed is not None
    World(draw(seed, plant.switch)).run()  # and it was the bug: the real cores keep the promise


def test_no_gap_arises_while_links_keep_their_order() -> None:
    """Why R1's gap cannot be planted alone: only together with R9 (see the plants) is it ever needed."""
    assert first_violation(Cores(server=OverlooksGaps), "slow_bulk", 30) is None


def test_a_copy_that_outlives_its_epoch_harms_nobody() -> None:
    """Its rows are of an epoch that their receiver has not, or are marked as a copy's where none is expected."""
    assert first_violation(Cores(server=CopiesOnAndOn), "moves", 30) is None


def first_violation(cores: Cores, switch: str, seeds: int) -> int | None:
    """The first seed on which a promise is broken. A bug that crashes is not found by that: what it overrides may have
    another name by now, and whatever is raised then is no oracle's doing."""
    for seed in range(seeds):
        try:
            World(draw(seed, switch), cores).run()
        except Violation:
            return seed
    return None
