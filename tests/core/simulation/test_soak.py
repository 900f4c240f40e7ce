"""Every switch of the simulator over thousands of seeds, in two processes: what takes too long for every day.

Seeds are neither those of `test_simulation.py` nor those of the benchmark `protocol_faults`. A failure names switch and
seed, and `python -m support.simulator` replays it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from multiprocessing import get_context

import pytest
from support.simulator.scenarios.base import SWITCHES
from support.simulator.seed_batches import explore

FIRST, SEEDS, CHUNK = 200_000, 2_000, 50
PROCESSES = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as made:
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("switch", SWITCHES)
def test_no_promise_is_broken_in_two_thousand_worlds(
    switch: str, pool: ProcessPoolExecutor
) -> None:
    firsts = range(FIRST, FIRST + SEEDS, CHUNK)
    found = pool.map(explore, repeat(switch), firsts, repeat(CHUNK))
    broken = [told for each in found for told in each]
    assert not broken, f"{len(broken)} seeds of {switch}, or more:\n" + "\n\n".join(broken)
