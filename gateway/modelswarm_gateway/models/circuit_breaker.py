"""Circuit breaker: refuses the prompts of a model for some time after its tokenizer failed several times in a row.

A success resets it, so that a client with hostile texts cannot close a model that others use.
"""

from __future__ import annotations

import time
from collections.abc import Callable

# Failures in a row, and the seconds for which prompts are refused after them.
MAX_FAILURES, REFUSAL_SECONDS = 3, 60.0


class CircuitBreaker:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._failures, self._reason = clock, 0, ""
        self._open_until = float("-inf")

    @property
    def seconds_open(self) -> float:
        """Seconds for which prompts are refused; at most 0 if they are not."""
        return self._open_until - self._clock()

    @property
    def reason(self) -> str:
        """Return why prompts are refused."""
        return f"{self._reason}, {MAX_FAILURES} times"

    def record_success(self) -> None:
        self._failures = 0

    def record_failure(self, reason: str) -> None:
        self._failures, self._reason = self._failures + 1, reason
        if self._failures >= MAX_FAILURES:
            self._failures = MAX_FAILURES - 1  # after the pause, one failure is enough
            self._open_until = self._clock() + REFUSAL_SECONDS
