"""The wait function of all tests: check a condition repeatedly until it is true, or report what was seen instead.

Used by tests of real processes and clusters, and by their helpers. The limit is generous, so that a busy machine never
decides the result of a test. A test of speed belongs to `bench/`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

SECONDS = 300.0  # default limit of a wait
LOOK_SECONDS = 0.01  # seconds between two checks


def eventually(
    what: str,
    condition: Callable[[], T | None],
    seconds: float = SECONDS,
    explain: Callable[[], object] | None = None,
) -> T:
    """Return the first true value of `condition`. Raise AssertionError with `what`, and what `explain` returns, after
    `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            seen = "" if explain is None else f": {explain()}"
            raise AssertionError(f"{what}: not within {seconds:g} s{seen}")
        time.sleep(LOOK_SECONDS)
    return value
