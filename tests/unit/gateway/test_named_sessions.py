"""Named sessions: kept between requests, bounded in number and in idle time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey


class Desk:
    """A book with a clock moved by hand, and what it opened and closed."""

    def __init__(self, limit: int = 2) -> None:
        self.now = 0.0
        self.open: list[str] = []
        self._names: Iterator[int] = count()
        self.book = NamedSessions(
            self._open, self.open.remove, lambda: self.now, limit=limit, idle_seconds=10
        )

    def _open(self, key: SessionKey, above: int) -> str:
        name = f"{key[0]}{next(self._names)}"
        self.open.append(name)
        return name


def code_of(desk: Desk, name: str) -> Code:
    with pytest.raises(ApiError) as caught:
        desk.book.acquire(("m", name))
    return caught.value.code


def test_session_is_found_by_name_and_model() -> None:
    desk = Desk()
    assert desk.book.acquire(("m", "a")) == "m0"
    desk.book.release(("m", "a"))
    assert desk.book.acquire(("m", "a")) == "m0"
    assert desk.book.acquire(("x", "a")) == "x1"


def test_busy_session_refuses_a_second_request() -> None:
    desk = Desk()
    desk.book.acquire(("m", "a"))
    assert code_of(desk, "a") is Code.SESSION_BUSY


def test_longest_idle_session_is_evicted_for_a_new_one() -> None:
    desk = Desk()
    for name in "ab":
        desk.book.acquire(("m", name))
        desk.book.release(("m", name))
    desk.book.acquire(("m", "a"))
    desk.book.acquire(("m", "c"))
    assert desk.open == ["m0", "m2"]
    assert code_of(desk, "d") is Code.NO_CAPACITY


def test_expired_idle_sessions_are_evicted_and_busy_ones_kept() -> None:
    desk = Desk()
    desk.book.acquire(("m", "a"))
    desk.book.acquire(("m", "b"))
    desk.book.release(("m", "b"))
    desk.now = 9
    desk.book.evict_expired()
    assert len(desk.book) == 2
    desk.now = 11
    desk.book.evict_expired()
    assert desk.open == ["m0"]


def test_dropped_session_is_closed_once() -> None:
    desk = Desk()
    desk.book.acquire(("m", "a"))
    desk.book.drop_session(("m", "a"))
    desk.book.drop_session(("m", "a"))
    assert desk.open == []


def test_eviction_for_pages_takes_only_sessions_of_that_model() -> None:
    desk = Desk()
    for key in (("m", "a"), ("x", "b")):
        desk.book.acquire(key)
        desk.book.release(key)
    assert desk.book.evict_idle("x")
    assert not desk.book.evict_idle("x")
    assert desk.open == ["m0"]
