"""Comparison of streams with one fault with the same streams without: longest pause, lost and doubled tokens.

Used by the benchmarks that kill or freeze a server on a stream's route. Does not know the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from bench.harness import Bar, Result, quantile
from bench.swarm import StreamResult

NO_TOKEN_LOST = (Bar("lost", "<=", 0), Bar("doubled", "<=", 0))


@dataclass
class GapStatistics:
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    doubled: int = 0

    def add(self, undisturbed: StreamResult, disturbed: StreamResult, seconds: float) -> None:
        self.seconds.append(seconds)
        lost, doubled = count_differences(undisturbed, disturbed)
        self.lost += lost
        self.doubled += doubled

    def result(self, name: str, what: str, shape: str, bars: Sequence[Bar]) -> Result:
        """Return the result. `what`: the faults, as a column's heading."""
        seconds = {
            "p50_s": quantile(self.seconds, 0.5),
            "p99_s": quantile(self.seconds, 0.99),
            "max_s": max(self.seconds),
        }
        lost = {"lost": self.lost, "doubled": self.doubled}
        row = [len(self.seconds), *(f"{value:.3f}" for value in seconds.values()), *lost.values()]
        return Result(
            name=name,
            figures={**seconds, **lost},
            columns=(what, "p50 s", "p99 s", "max s", "lost", "doubled"),
            rows=[list(map(str, row))],
            shape=shape,
            threads=1,
            bars=[*bars, *NO_TOKEN_LOST],
        )


def count_differences(undisturbed: StreamResult, disturbed: StreamResult) -> tuple[int, int]:
    """Return (lost, doubled): positions that are missing or have another token; positions that came twice."""
    wanted = dict(zip(undisturbed.positions, undisturbed.tokens, strict=True))
    came = dict(zip(disturbed.positions, disturbed.tokens, strict=True))
    lost = sum(came.get(position) != token for position, token in wanted.items())
    return lost, len(disturbed.positions) - len(came)


def longest_pause(times: Sequence[float], since: float) -> float:
    """Return the longest wait for a token after `since`. Tokens in transit at that moment arrive at once."""
    return max(b - max(a, since) for a, b in pairwise(times) if b > since)
