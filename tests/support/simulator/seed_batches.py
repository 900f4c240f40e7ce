"""Many seeds of one scenario, for processes that share them: what oracles said, as text that can be sent.

Used by `test_soak.py`.
"""

from __future__ import annotations

from support.simulator.trace import Violation
from support.simulator.world import simulate

TOLD = 3  # violations, after which the rest of the seeds is left out


def explore(scenario: str, first: int, count: int) -> list[str]:
    """Of seeds [first, first + count): which one, how to replay it, and the last events of the session that saw it."""
    said: list[str] = []
    for seed in range(first, first + count):
        try:
            simulate(seed, scenario)
        except Violation as violation:
            said.append(str(violation))
            if len(said) == TOLD:
                break
    return said
