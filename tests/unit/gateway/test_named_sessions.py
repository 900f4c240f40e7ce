"""Named sessions: kept between requests, limited in number and in idle time."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey


class SessionsHarness:
    """Named sessions with a clock that tests move; `open` lists the wire names of open sessions."""

    def __init__(self, limit: int = 2) -> None:
        self.now = 0.0
        self.open: list[str] = []
        self._names: Iterator[int] = count()
        self.sessions = NamedSessions(
            self._open, self.open.remove, lambda: self.now, limit=limit, idle_seconds=10
        )

    def _open(self, key: SessionKey, above: int) -> str:
        name = f"{key[0]}{next(self._names)}"
        self.open.append(name)
        return name


def refusal_code(harness: SessionsHarness, name: str) -> Code:
    with pytest.raises(ApiError) as caught:
        harness.sessions.acquire(("m", name))
    return caught.value.code


def test_session_is_found_by_name_and_model() -> None:
    harness = SessionsHarness()
    assert harness.sessions.acquire(("m", "a")) == "m0"
    harness.sessions.release(("m", "a"))
    assert harness.sessions.acquire(("m", "a")) == "m0"
    assert harness.sessions.acquire(("x", "a")) == "x1"


def test_busy_session_refuses_a_second_request() -> None:
    harness = SessionsHarness()
    harness.sessions.acquire(("m", "a"))
    assert refusal_code(harness, "a") is Code.SESSION_BUSY


def test_longest_idle_session_is_evicted_for_a_new_one() -> None:
    harness = SessionsHarness()
    for name in "ab":
        harness.sessions.acquire(("m", name))
        harness.sessions.release(("m", name))
    harness.sessions.acquire(("m", "a"))
    harness.sessions.acquire(("m", "c"))
    assert harness.open == ["m0", "m2"]
    assert refusal_code(harness, "d") is Code.NO_CAPACITY


def test_expired_idle_sessions_are_evicted_and_busy_ones_kept() -> None:
    harness = SessionsHarness()
    harness.sessions.acquire(("m", "a"))
    harness.sessions.acquire(("m", "b"))
    harness.sessions.release(("m", "b"))
    harness.now = 9
    harness.sessions.evict_expired()
    assert len(harness.sessions) == 2
    harness.now = 11
    harness.sessions.evict_expired()
    assert harness.open == ["m0"]


def test_dropped_session_is_closed_once() -> None:
    harness = SessionsHarness()
    harness.sessions.acquire(("m", "a"))
    harness.sessions.drop_session(("m", "a"))
    harness.sessions.drop_session(("m", "a"))
    assert harness.open == []


def test_eviction_for_a_fork_spares_its_parent() -> None:
    harness = SessionsHarness()
    for name in "ab":
        harness.sessions.acquire(("m", name))
        harness.sessions.release(("m", name))
    assert harness.sessions.acquire(("m", "c"), spared=("m", "a")) == "m2"
    assert not harness.sessions.evict_idle(spared=("m", "a"))
    assert harness.open == ["m0", "m2"]
