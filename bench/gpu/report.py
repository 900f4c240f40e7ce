"""The parts of the GPU benchmark, one after the other, and their table in Markdown for docs/benchmarks.md.

Run unattended: `python -m bench.gpu`, or some parts: `python -m bench.gpu decode prefill`. Each row is printed as it is
made, so that a killed run has told what it measured. A case that fails is a row, and the others still run.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from bench.harness import Bar, Result

BARS = tuple(Bar(name, "<=", 0) for name in ("failed", "wrong", "kill_lost", "kill_doubled"))
COLUMNS = ("part", "case", "measured", "limit", "share")


@dataclass
class Table:
    """Rows and figures of the parts that ran."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=lambda: {"failed": 0.0})

    def add(self, *row: str) -> None:
        """Print a row now; if $OUT names a folder, write the table into its `gpu.txt`."""
        self.rows.append(row)
        print(line(row), flush=True)
        if folder := os.environ.get("OUT"):
            (Path(folder) / "gpu.txt").write_text(markdown(self.rows) + "\n")

    def count(self, figure: str, number: float) -> None:
        self.figures[figure] = self.figures.get(figure, 0.0) + number

    @contextmanager
    def case(self, part: str, name: str) -> Iterator[None]:
        """Catch any fault of a case and add it as a row, so that the other cases still run."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.count("failed", 1)
            reason = " ".join(f"{type(error).__name__}: {error}".split()).replace("|", "/")
            self.add(part, name, f"failed: {reason[:200]}", "", "")


Part: TypeAlias = Callable[[Table], None]


def _part(module: str, function: str) -> Part:
    """Return a part whose module is imported when its turn comes, because an import may fail too."""

    def measure(table: Table) -> None:
        getattr(importlib.import_module(f"bench.gpu.{module}"), function)(table)

    return measure


PARTS: Mapping[str, Part] = {
    "correctness": _part("correctness", "check_first"),
    "decode": _part("speed", "measure_decode"),
    "prefill": _part("speed", "measure_prefill"),
    "memory": _part("processes", "measure_memory"),
    "hop": _part("processes", "measure_hop"),
    "kill": _part("processes", "measure_kills"),
    "correctness-rest": _part("correctness", "check_rest"),
}
"""The parts by name, those of the most value first."""


def run(names: Sequence[str] = ()) -> Result | None:
    """Run these parts, or all, on the first GPU; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("gpu: not run, because torch sees no CUDA device on this machine")
        return None
    table = Table()
    run_parts({name: PARTS[name] for name in names or PARTS}, table)
    return Result(
        name="gpu",
        figures=table.figures,
        columns=COLUMNS,
        rows=table.rows,
        shape=f"{torch.cuda.get_device_name()}, torch {torch.__version__}",
        threads=torch.get_num_threads(),
        bars=[bar for bar in BARS if bar.figure in table.figures],
    )


def run_parts(parts: Mapping[str, Part], table: Table) -> None:
    """Run the parts, add the seconds of each, and print the whole table at the end, also of a run that is stopped."""
    try:
        for name, part in parts.items():
            began = time.perf_counter()
            with table.case(name, "the whole part"):
                part(table)
            table.add(name, "the whole part", f"{time.perf_counter() - began:.0f} s", "", "")
    finally:
        print(markdown(table.rows), flush=True)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(line(each) for each in (COLUMNS, ("---",) * len(COLUMNS), *rows))


def line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"
