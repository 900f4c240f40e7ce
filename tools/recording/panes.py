"""Several terminals on one screen, one below the other, each under a line with its title; recorded as one session."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from tools.recording.cast import MARK, OUTPUT, Cast, Event
from tools.recording.screen import Row, Run, Screen, Style, escape_codes

TITLE_STYLE = Style(front="cyan", is_bold=True)
CLEAR = "\x1b[2J\x1b[?25l"  # and without a cursor, as there are several


class Pane:
    """One terminal's part of the screen."""

    def __init__(self, title: str, rows: int, columns: int) -> None:
        self.title, self.rows, self.columns = title, rows, columns
        self._screen = Screen(columns, rows)

    def feed(self, piece: bytes) -> None:
        self._screen.feed(piece)

    def compose(self) -> list[Row]:
        line = f"── {self.title} " + "─" * (self.columns - len(self.title) - 4)
        return [(Run(0, line, TITLE_STYLE),), *self._screen.rows()]


class Recorder:
    """Takes the output of all panes, from any thread, and keeps the changed rows as events of a cast."""

    def __init__(
        self, panes: Sequence[Pane], title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._panes, self._clock = panes, clock
        self._lock = threading.Lock()
        self._began = clock()
        self._shown: list[Row] = []
        rows = sum(pane.rows + 1 for pane in panes)
        self.cast = Cast(panes[0].columns, rows, title, int(time.time()))

    def feed(self, pane: Pane, piece: bytes) -> None:
        with self._lock:
            pane.feed(piece)

    def take(self) -> None:
        """Keep what has changed since the last time."""
        with self._lock:
            rows = [row for pane in self._panes for row in pane.compose()]
            shown = self._shown or [()] * len(rows)
            changes = [
                f"\x1b[{number};1H\x1b[2K{escape_codes(row)}"
                for number, (row, before) in enumerate(zip(rows, shown, strict=True), 1)
                if row != before
            ]
            if changes:
                self._keep(OUTPUT, ("" if self._shown else CLEAR) + "".join(changes))
            self._shown = rows

    def mark(self, label: str) -> None:
        """Keep the present screen, and a mark behind it."""
        self.take()
        self._keep(MARK, label)

    def _keep(self, kind: str, data: str) -> None:
        self.cast.events.append(Event(self._clock() - self._began, kind, data))
