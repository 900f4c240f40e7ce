"""All parts of the GPU benchmark, one after the other, and their table in Markdown for docs/benchmarks.md.

A part that fails is a row of the table, and the others still run. Run unattended: `python -m bench.gpu`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from bench.harness import Bar, Result

BARS = tuple(Bar(name, "<=", 0) for name in ("failed", "wrong", "kill_lost", "kill_doubled"))
COLUMNS = ("part", "case", "measured", "limit", "share")


@dataclass
class Outcome:
    """Rows and figures of one part."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def run() -> Result | None:
    """Run all parts on the first GPU; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("gpu: not run, because torch sees no CUDA device on this machine")
        return None
    whole = Outcome(figures={bar.figure: 0.0 for bar in BARS})
    for name, part in parts():
        try:
            outcome = part()
        except Exception as error:  # any fault of a part; the other parts still run
            traceback.print_exc()
            whole.figures["failed"] += 1
            outcome = Outcome([(name, "failed", f"{type(error).__name__}: {error}", "", "")])
        whole.rows += outcome.rows
        whole.figures |= outcome.figures
    print(markdown(whole.rows))
    return Result(
        name="gpu",
        figures=whole.figures,
        columns=COLUMNS,
        rows=whole.rows,
        shape=f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        threads=torch.get_num_threads(),
        bars=BARS,
    )


def parts() -> Iterator[tuple[str, Callable[[], Outcome]]]:
    """The parts by name. Each is imported when its turn comes, because an import may fail too."""
    from bench.gpu import correctness, processes, speed

    yield "correctness", correctness.check_families
    yield "speed", speed.measure_span
    yield "hop", processes.measure_hop
    yield "kill", processes.measure_kills


def markdown(rows: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
