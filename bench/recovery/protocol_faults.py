"""Both real cores under seeded faults in virtual time: number of faults, and number of violated guarantees.

The simulator of `tests/support/simulator` runs a fixed range of seeds of every scenario in two processes. `faults`
counts injected faults (kills, drops, stops, partitions ...), not the messages lost or repeated by them. `violations`
counts seeds in which an oracle found a violation.
"""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context

from bench.harness import Bar, Result

FIRST_SEED, SEEDS, CHUNK = 100_000, 240, 40  # seeds per scenario; others than those of the tests
PROCESSES = 2
MIN_FAULTS = 100_000


@dataclass(slots=True)
class SimulationTotals:
    seeds: int = 0
    sessions: int = 0
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    disturbed_messages: int = 0  # messages lost or repeated
    violations: list[str] = field(default_factory=list)  # first lines of the oracles' reports

    def add(self, other: SimulationTotals) -> None:
        self.seeds += other.seeds
        self.sessions += other.sessions
        self.tokens += other.tokens
        self.faults.update(other.faults)
        self.disturbed_messages += other.disturbed_messages
        self.violations += other.violations


def run() -> Result:
    from support.simulator.scenarios.base import SCENARIOS

    jobs = [(s, at) for s in SCENARIOS for at in range(FIRST_SEED, FIRST_SEED + SEEDS, CHUNK)]
    tallies: dict[str, SimulationTotals] = {scenario: SimulationTotals() for scenario in SCENARIOS}
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        for (scenario, _), tally in zip(
            jobs, pool.map(run_seeds, *zip(*jobs, strict=True)), strict=True
        ):
            tallies[scenario].add(tally)
    total = SimulationTotals()
    for tally in tallies.values():
        total.add(tally)
    for broken in total.violations:
        print(broken, file=sys.stderr)
    return Result(
        name="protocol_faults",
        figures={
            "faults": total.faults.total(),
            "violations": len(total.violations),
            "seeds": total.seeds,
            "sessions": total.sessions,
            "tokens": total.tokens,
            "messages_lost_or_repeated": total.disturbed_messages,
        },
        columns=("scenario", "seeds", "sessions", "tokens", "faults", "violations"),
        rows=[_row(name, tally) for name, tally in [*tallies.items(), ("all", total)]],
        shape="hash model in virtual time, routes of 1 to 5 hops; "
        + ", ".join(f"{count} {kind}" for kind, count in total.faults.most_common()),
        threads=PROCESSES,
        bars=[Bar("faults", ">=", MIN_FAULTS), Bar("violations", "<=", 0)],
    )


def run_seeds(scenario: str, first: int) -> SimulationTotals:
    """Run the seeds [first, first + CHUNK) of a scenario."""
    from support.simulator.trace import Violation
    from support.simulator.world import simulate

    tally = SimulationTotals(seeds=CHUNK)
    for seed in range(first, first + CHUNK):
        try:
            outcome = simulate(seed, scenario)
        except Violation as violation:
            tally.violations.append("\n".join(str(violation).splitlines()[:3]))
            continue
        tally.sessions += outcome.sessions
        tally.tokens += outcome.tokens
        tally.faults.update(outcome.faults)
        tally.disturbed_messages += outcome.lost + outcome.repeated
    return tally


def _row(name: str, tally: SimulationTotals) -> tuple[str, ...]:
    counts = (
        tally.seeds,
        tally.sessions,
        tally.tokens,
        tally.faults.total(),
        len(tally.violations),
    )
    return name, *(str(count) for count in counts)
