"""Waiting for something to become true, with a deadline and a sentence for the one who waited in vain.

Used by every part of the cluster and by tests. Knows nothing of what is waited for, only that a server on a busy
machine is away for a moment now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx

T = TypeVar("T")


class TooLate(AssertionError):
    """The deadline passed. The message says what was waited for and what was seen last."""


class NoAnswer(Exception):
    """Whoever was asked is too busy, or away: neither yes nor no. Who waits asks again; for all others an error."""


UNSEEN = (NoAnswer, httpx.TransportError)


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
        last: object
        try:
            if seen := look():
                return seen
            last = seen
        except UNSEEN as error:
            last = error
        if time.monotonic() > deadline:
            more = f"\n{_explained(explain)}" if explain is not None else ""
            raise TooLate(f"{what}: not within {seconds:g} s (last seen: {last!r}){more}")
        time.sleep(every)


def _explained(explain: Callable[[], str]) -> str:
    try:
        return explain()
    except UNSEEN as error:
        return f"and nothing explains it: {error}"
