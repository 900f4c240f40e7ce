"""Waiting for something to become true, with a deadline and a sentence for the one who waited in vain.

Used by every part of the cluster and by tests. Knows nothing of what is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class TooLate(AssertionError):
    """The deadline passed. The message says what was waited for and what was seen last."""


def wait_for(
    what: str,
    look: Callable[[], T | None],
    seconds: float,
    *,
    every: float = 0.1,
    explain: Callable[[], str] | None = None,
) -> T:
    """The first answer of `look` that is true; `explain` is asked only when time is up."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            more = f"\n{explain()}" if explain is not None else ""
            raise TooLate(f"{what}: not within {seconds:g} s (last seen: {seen!r}){more}")
        time.sleep(every)
