"""The report of a walk: a line for each command with its duration and exit code, and a log with all output."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    command: str
    seconds: float
    code: int | None  # none: it still ran, or ran elsewhere
    fault: str = ""
    note: str = ""

    def line(self) -> str:
        judgement = (
            "FAULT" if self.fault else "ok" if self.code is not None or not self.note else "-"
        )
        code = "" if self.code is None else f"exit {self.code}"
        remark = self.fault or self.note
        return f"{judgement:<6}{self.seconds:>8.1f} s  {code:<9}{self.command}" + (
            f"\n{'':<27}{remark}" if remark else ""
        )


@dataclass
class Report:
    """Prints each row when it is there."""

    log: Path
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("", encoding="utf-8")

    def tell(self, text: str) -> None:
        print(text, flush=True)
        self._write(f"=== {text}\n")

    def add(self, row: Row, output: str = "") -> None:
        self.rows.append(row)
        print(row.line(), flush=True)
        self._write(f"$ {row.command}\n{output.rstrip()}\n--- {row.line().strip()}\n\n")

    def summary(self) -> str:
        faults = sum(bool(row.fault) for row in self.rows)
        elsewhere = sum(row.code is None and bool(row.note) and not row.fault for row in self.rows)
        tried = len(self.rows) - elsewhere
        return (
            f"{tried} commands tried, {faults} with a fault, {elsewhere} run elsewhere; "
            f"all output is in {self.log}"
        )

    @property
    def is_good(self) -> bool:
        return bool(self.rows) and not any(row.fault for row in self.rows)

    def _write(self, text: str) -> None:
        with self.log.open("a", encoding="utf-8") as file:
            file.write(text)
