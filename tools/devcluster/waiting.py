"""The wait function of the cluster and its tests: with a deadline, and a sentence when it has passed.

Unlike `support.eventually` it bears that a server on a busy machine does not answer for a moment. It is here because
tools import nothing from tests. Knows nothing else of the condition that it waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

T = TypeVar("T")


class WaitTimeout(AssertionError):
    """The deadline has passed. The message has the condition's name and its last value."""


class NoResponse(Exception):
    """A server is too busy or does not run: neither yes nor no. `wait_for` asks again; for others it is an error."""


RETRIED_ERRORS = (NoResponse, httpx.TransportError)


def wait_for(
    what: str,
    condition: Callable[[], T | None],
    seconds: float,
    *,
    every: float = 0.1,
    explain: Callable[[], str] | None = None,
) -> T:
    """Return the first true value of `condition`. `explain` is called only after the deadline."""
    deadline = time.monotonic() + seconds
    while True:
        last: object
        try:
            if seen := condition():
                return seen
            last = seen
        except RETRIED_ERRORS as error:
            last = error
        if time.monotonic() > deadline:
            more = f"\n{_explained(explain)}" if explain is not None else ""
            raise WaitTimeout(f"{what}: not within {seconds:g} s (last seen: {last!r}){more}")
        time.sleep(every)


def _explained(explain: Callable[[], str]) -> str:
    try:
        return explain()
    except RETRIED_ERRORS as error:
        return f"and nothing explains it: {error}"
