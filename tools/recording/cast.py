"""The asciinema file (version 2) of a session: events with times, and marks with labels.

Used by `record_session.py` and by the test that replays the recorded session. Knows no programs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.recording.screen import Row, Screen, text_of

OUTPUT, MARK = "o", "m"
IDLE_SECONDS = 2.0  # players skip longer pauses


@dataclass(frozen=True, slots=True)
class Event:
    seconds: float
    kind: str
    data: str


@dataclass
class Cast:
    """A recorded session."""

    columns: int
    rows: int
    title: str
    made_at: int  # Unix time, seconds
    events: list[Event] = field(default_factory=list)

    def write(self, path: Path) -> None:
        header = {
            "version": 2,
            "width": self.columns,
            "height": self.rows,
            "timestamp": self.made_at,
            "idle_time_limit": IDLE_SECONDS,
            "title": self.title,
            "env": {"TERM": "xterm-256color", "SHELL": "/bin/bash"},
        }
        lines = [json.dumps(header)]
        lines += [
            json.dumps([round(event.seconds, 3), event.kind, event.data], ensure_ascii=False)
            for event in self.events
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def replay(self) -> Iterator[tuple[Event, list[Row]]]:
        """Yield every event with the screen after it."""
        screen = Screen(self.columns, self.rows)
        for event in self.events:
            if event.kind == OUTPUT:
                screen.feed(event.data.encode())
            yield event, screen.rows()

    def marks(self) -> list[tuple[str, list[str]]]:
        """Return the label of each mark with the screen's lines at that time."""
        return [(event.data, lines_of(rows)) for event, rows in self.replay() if event.kind == MARK]


def lines_of(rows: Sequence[Row]) -> list[str]:
    return [text_of(row) for row in rows]


def read_cast(path: Path) -> Cast:
    """Read a file. Raises ValueError if it is no asciinema file of version 2 with times in order."""
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    facts = json.loads(header)
    if facts["version"] != 2:
        raise ValueError(f"{path}: version {facts['version']} instead of 2")
    events = [Event(float(seconds), kind, data) for seconds, kind, data in map(json.loads, lines)]
    times = [event.seconds for event in events]
    if times != sorted(times):
        raise ValueError(f"{path}: the times of its events are not in order")
    return Cast(facts["width"], facts["height"], facts["title"], facts["timestamp"], events)
