"""The parts of the GPU benchmark, one after the other, and their table in Markdown for docs/benchmarks.md.

Run unattended: `python -m bench.gpu`, or some parts: `python -m bench.gpu decode prefill`. Each row is printed as it is
made, so that a killed run has told what it measured. A case that fails is a row, and the others still run. Parts and
families run in processes of their own: after a fault of a kernel the driver refuses all further work of its process.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeAlias

from typing_extensions import override

from bench.harness import Bar, Result

BARS = tuple(Bar(name, "<=", 0) for name in ("failed", "wrong", "kill_lost", "kill_doubled"))
MINUTES = 60.0
"""Limit of a run, so that a part that hangs does not keep a machine."""
FIRST = ("llama", "qwen3", "mixtral", "gemma2", "gpt_oss", "deepseek_v3")
"""Families that are checked first."""
COLUMNS = ("part", "case", "measured", "limit", "share")


@dataclass
class Table:
    """Rows and figures of the parts that ran."""

    rows: list[tuple[str, ...]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=lambda: {"failed": 0.0})
    deadline: float = math.inf  # time.monotonic; nothing runs after it

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


class _SentTable(Table):
    """The table of a process that runs a part: rows and figures go to the process that prints them."""

    def __init__(self, rows: Connection) -> None:
        super().__init__()
        self._sent = rows

    @override
    def add(self, *row: str) -> None:
        self._sent.send((row, self.figures))


Part: TypeAlias = Callable[[Table], None]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of a function of the benchmark. Its module is imported by then, because an import may fail too."""

    module: str
    function: str
    arguments: tuple[str, ...] = ()

    def __call__(self, table: Table) -> None:
        module = importlib.import_module(f"bench.gpu.{self.module}")
        getattr(module, self.function)(table, *self.arguments)


def run_apart(part: str, case: str, work: Part, table: Table) -> None:
    """Run a part, or a case of it, in a process of its own until the deadline; add its rows and figures."""
    if _seconds_left(table) == 0:
        table.add(part, case, "not run: no time is left", "", "")
        return
    context = multiprocessing.get_context("spawn")  # a fork has no usable driver
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run_work, args=(part, case, work, theirs), daemon=True)
    process.start()
    theirs.close()
    figures, outcome = _receive(ours, table)
    if outcome:
        process.kill()
    process.join()
    for name, value in figures.items():
        table.count(name, value)
    if not outcome and process.exitcode:
        outcome = f"failed: its process ended with exit code {process.exitcode}"
    if outcome:
        table.count("failed", 1)
        table.add(part, case, outcome, "", "")


def _receive(rows: Connection, table: Table) -> tuple[dict[str, float], str]:
    """Add the rows of a process until it ends. Return its figures, and its fault if there was no time for all."""
    figures: dict[str, float] = {}
    while rows.poll(_seconds_left(table)):
        try:
            row, figures = rows.recv()
        except EOFError:
            return figures, ""
        if row:
            table.add(*row)
    return figures, "failed: stopped, because no time is left"


def _seconds_left(table: Table) -> float | None:
    return None if table.deadline == math.inf else max(0.0, table.deadline - time.monotonic())


def _run_work(part: str, case: str, work: Part, rows: Connection) -> None:
    table = _SentTable(rows)
    with table.case(part, case):
        work(table)
    rows.send(((), table.figures))


WHOLE = "the whole part"


def _part(name: str, module: str, function: str) -> Part:
    """Return a part that runs in a process of its own."""
    return lambda table: run_apart(name, WHOLE, _Call(module, function), table)


def _check_first(table: Table) -> None:
    for family in FIRST:
        run_apart("correctness", family, _Call("correctness", "check_first", (family,)), table)


PARTS: Mapping[str, Part] = {
    "correctness": _check_first,
    "decode": _part("decode", "speed", "measure_decode"),
    "prefill": _part("prefill", "speed", "measure_prefill"),
    "memory": _part("memory", "processes", "measure_memory"),
    "hop": _part("hop", "processes", "measure_hop"),
    "kill": _part("kill", "processes", "measure_kills"),
    "correctness-rest": _part("correctness-rest", "correctness", "check_rest"),
}
"""The parts by name, those of the most value first."""


def run(names: Sequence[str] = (), minutes: float = MINUTES) -> Result | None:
    """Run these parts, or all, on the first GPU for at most so many minutes; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        print("gpu: not run, because torch sees no CUDA device on this machine")
        return None
    table = Table(deadline=time.monotonic() + 60 * minutes)
    device = torch.cuda.get_device_name()  # asked now: a GPU that is lost has none
    run_parts({name: PARTS[name] for name in names or PARTS}, table)
    return Result(
        name="gpu",
        figures=table.figures,
        columns=COLUMNS,
        rows=table.rows,
        shape=f"{device}, torch {torch.__version__}",
        threads=torch.get_num_threads(),
        bars=[bar for bar in BARS if bar.figure in table.figures],
    )


def run_parts(parts: Mapping[str, Part], table: Table) -> None:
    """Run the parts, add the seconds of each, and print the whole table at the end, also of a run that is stopped."""
    try:
        for name, part in parts.items():
            began = time.perf_counter()
            with table.case(name, WHOLE):
                part(table)
            table.add(name, WHOLE, f"{time.perf_counter() - began:.0f} s", "", "")
    finally:
        print(markdown(table.rows), flush=True)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(line(each) for each in (COLUMNS, ("---",) * len(COLUMNS), *rows))


def line(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"
