"""The progress of starting processes on screens: cells of tables, lines, and reasons that last.

Pure: progress and times in, texts out. Used by `up` and `status`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from modelswarm.cli.terminal.states import STARTING_STYLE
from modelswarm.cli.terminal.tables import Cell
from modelswarm.local.start_state import describe_amount
from modelswarm.process.start_progress import BYTE_PHASES, StartProgress

# Seconds after which a reason is reported: links and files take less when nothing is wrong.
REASON_SECONDS = 2.0
_BAR_WIDTH = 12


def phase_cell(progress: StartProgress) -> Cell:
    """Return the cell of a phase. Bytes have a bar and per cent, in its short form only per cent."""
    amount = describe_amount(progress)
    if not amount:
        return Cell(progress.phase, style=STARTING_STYLE)
    if progress.phase not in BYTE_PHASES:
        return Cell(f"{progress.phase} {amount}", short=progress.phase, style=STARTING_STYLE)
    percent = f"{100 * progress.done // progress.total} %"
    return Cell(
        f"{progress.phase} {draw_bar(progress)} {percent}",
        short=f"{progress.phase} {percent}",
        style=STARTING_STYLE,
    )


def draw_bar(progress: StartProgress) -> str:
    """Return `[######......]`; `total` must be known."""
    full = _BAR_WIDTH * min(progress.done, progress.total) // progress.total
    return f"[{'#' * full}{'.' * (_BAR_WIDTH - full)}]"


@dataclass(slots=True)
class _Seen:
    """The last state of a process that was reported."""

    phase: str = ""
    reason: str = ""
    since: float = 0.0  # time at which `reason` began
    reported: set[str] = field(default_factory=set)  # reasons


class PhaseLog:
    """Returns a line for each change of a phase, and one for each reason that lasts."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def phase_lines(self, progress: Mapping[str, StartProgress]) -> list[str]:
        """Return `NAME: PHASE` for each process whose phase is new. `ready` is said by others."""
        lines = []
        self._seen = {name: seen for name, seen in self._seen.items() if name in progress}
        for name, now in progress.items():
            seen = self._seen.setdefault(name, _Seen())
            if seen.phase != now.phase:
                seen.phase = now.phase
                lines.append(f"{name}: {now.phase}{_size(now)}")
        return lines

    def reason_lines(self, progress: Mapping[str, StartProgress], now: float) -> list[str]:
        """Return `NAME: PHASE: REASON` for each reason that has lasted, once."""
        lines = []
        for name, state in progress.items():
            seen, reason = self._seen.setdefault(name, _Seen()), " ".join(state.reason.split())
            if seen.reason != reason:
                seen.reason, seen.since = reason, now
            if reason and reason not in seen.reported and now - seen.since >= REASON_SECONDS:
                seen.reported.add(reason)
                lines.append(f"{name}: {state.phase}: {reason}")
        return lines


def _size(progress: StartProgress) -> str:
    """Return the size of the phase, as its line is printed when it begins."""
    amount = describe_amount(progress)
    return f" ({amount})" if amount else ""
