"""All scenarios of the simulator over thousands of seeds, in two processes: too slow for the fast tier.

The seeds differ from those of `test_simulation.py` and of the benchmark `protocol_faults`. A failure names scenario
and seed, and `python -m support.simulator` replays it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import pytest
from support.simulator.scenarios.base import SCENARIOS
from support.simulator.seed_batches import run_batch

FIRST, SEEDS, CHUNK = 200_000, 2_000, 50
PROCESSES = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as made:
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_two_thousand_seeds_have_no_violation(scenario: str, pool: ProcessPoolExecutor) -> None:
    firsts = range(FIRST, FIRST + SEEDS, CHUNK)
    found = pool.map(run_batch, repeat(scenario), firsts, repeat(CHUNK))
    violations = [text for batch in found for text in batch]
    assert not violations, f"{scenario}: {len(violations)} seeds or more:\n" + "\n\n".join(
        violations
    )
