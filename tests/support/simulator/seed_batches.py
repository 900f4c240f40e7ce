"""Runs many seeds of one scenario in a process of a pool; returns the violations as text.

Used by `test_soak.py`.
"""

from __future__ import annotations

from support.simulator.trace import Violation
from support.simulator.world import simulate

MAX_VIOLATIONS = 3  # of a batch; the rest of its seeds is skipped


def run_batch(scenario: str, first: int, count: int) -> list[str]:
    """Run the seeds [first, first + count); return each violation with its seed and the session's last events."""
    violations: list[str] = []
    for seed in range(first, first + count):
        try:
            simulate(seed, scenario)
        except Violation as violation:
            violations.append(str(violation))
            if len(violations) == MAX_VIOLATIONS:
                break
    return violations
