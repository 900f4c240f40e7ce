"""How long to wait before a dead process is started again (pure; the clock is the caller's).

Used by the supervisor, one per process: 0.5 s, doubling to 30 s, forgotten after a minute of good running.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RestartBackoff:
    initial: float = 0.5  # seconds
    maximum: float = 30.0
    reset_after: float = 60.0  # running this long forgets earlier failures
    _next: float = 0.0

    def next_delay(self, ran: float) -> float:
        """Seconds to wait, after a run of `ran` seconds."""
        wait = self.initial if ran >= self.reset_after or self._next == 0.0 else self._next
        self._next = min(wait * 2, self.maximum)
        return wait
