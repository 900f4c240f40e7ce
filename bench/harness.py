"""The result of a benchmark: its figures and bars, the printed table, the result file.

A benchmark is a module with a function `run` that returns a Result. `__main__.py` runs it and writes
`bench/results/<name>.json`. Does not know any benchmark.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS_FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Bar:
    """The limit of a figure: at least (`>=`) or at most (`<=`) a value."""

    figure: str
    sense: str
    value: float

    def is_met(self, figures: dict[str, float]) -> bool:
        measured = figures[self.figure]
        return measured >= self.value if self.sense == ">=" else measured <= self.value


@dataclass(frozen=True, slots=True)
class Result:
    name: str
    figures: dict[str, float]  # by name; read by other tools
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    shape: str  # of the model and the swarm
    threads: int
    bars: Sequence[Bar] = field(default_factory=tuple)


def report(result: Result) -> bool:
    """Print the table and write the file. Return True if every bar is met."""
    table = Table(title=f"{result.name}: {result.shape}", title_justify="left")
    for column in result.columns:
        table.add_column(column, justify="right")
    for row in result.rows:
        table.add_row(*row)
    console = Console(width=140)
    console.print(table)
    for bar in result.bars:
        outcome = "met" if bar.is_met(result.figures) else "MISSED"
        console.print(
            f"  {bar.figure} {result.figures[bar.figure]:.3g} {bar.sense} {bar.value:g}: {outcome}"
        )
    RESULTS_FOLDER.mkdir(exist_ok=True)
    document = {
        "name": result.name,
        "figures": result.figures,
        "bars": [asdict(bar) for bar in result.bars],
        "machine": describe_machine(),
        "threads": result.threads,
        "shape": result.shape,
        "commit": describe_commit(),
    }
    (RESULTS_FOLDER / f"{result.name}.json").write_text(json.dumps(document, indent=2) + "\n")
    return all(bar.is_met(result.figures) for bar in result.bars)


def describe_machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        model = names[0] if names else model
    return f"{os.cpu_count()} x {model}, {platform.system()}, Python {platform.python_version()}"


def describe_commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def quantile(values: Sequence[float], q: float) -> float:
    """Return the smallest value that is at least as large as a share `q` of the values."""
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]
