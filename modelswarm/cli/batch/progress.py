"""The progress of a batch on a terminal: a bar, counts, speed and the time that is left. Elsewhere nothing is shown."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from modelswarm.cli.terminal.tables import can_redraw


class _Speed(ProgressColumn):
    def render(self, task: Task) -> Text:
        """Return the lines per second of the last half minute."""
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="cyan")


class ProgressBar:
    """Draws on stderr, so that it never mixes with what the command prints."""

    def __init__(self, total: int, done: int, failed: int) -> None:
        self._failed = failed
        console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}", style="red"),
            _Speed(),
            TimeRemainingColumn(),
            console=console,
            disable=not can_redraw(console),
        )
        self._task = self._progress.add_task("", total=total, completed=done, failed=self._remark())

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def count_line(self, is_ok: bool) -> None:
        """Show one more line."""
        self._failed += not is_ok
        self._progress.update(self._task, advance=1, failed=self._remark())

    def _remark(self) -> str:
        return f"{self._failed} failed" if self._failed else ""
