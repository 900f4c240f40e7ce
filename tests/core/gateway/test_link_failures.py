"""Failures of a link between two servers: counted by generation, and up to a number."""

from __future__ import annotations

import sys
from collections.abc import Callable

from modelswarm_gateway.core.servers.link_failures import MAX_FAILURES, LinkFailures

SECONDS = 30.0


def test_link_that_keeps_failing_is_counted_up_to_a_number() -> None:
    """It never rests for long enough to be forgotten, and each plan counts its failures."""
    links = LinkFailures(SECONDS)
    for generation in range(10 * MAX_FAILURES):
        links.record_failure("s0", "s1", generation, generation * SECONDS / 2)
    now = 10 * MAX_FAILURES * SECONDS / 2
    assert links.unreliable(now) == {frozenset({"s0", "s1"}): MAX_FAILURES}
    assert links.unreliable(now + SECONDS) == {}


def calls_of(work: Callable[[], object]) -> int:
    """Return the number of functions that are called during the work."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, argument: events.append(event))
    try:
        work()
    finally:
        sys.setprofile(None)
    return sum(event.endswith("call") for event in events)


def test_plan_looks_at_no_link_that_failed_once() -> None:
    """A network that fails for a moment breaks thousands of links, and each session plans a route."""
    links = LinkFailures(SECONDS)
    for number in range(2000):
        links.record_failure(f"a{number}", f"b{number}", 0, 0.0)
    for generation in range(2):
        links.record_failure("s0", "s1", generation, 1.0)
    assert calls_of(lambda: links.unreliable(2.0)) < 20
    assert links.unreliable(2.0) == {frozenset({"s0", "s1"}): 2}
    assert links.unreliable(SECONDS + 0.5) == {frozenset({"s0", "s1"}): 2}
    assert links.unreliable(SECONDS + 1.5) == {}


def test_links_are_forgotten_in_the_order_of_their_last_failures() -> None:
    links = LinkFailures(SECONDS)
    for at, (one, other) in ((0, "ab"), (0, "cd"), (1, "ab"), (2, "cd"), (25, "ab")):
        links.record_failure(one, other, at, float(at))
    assert set(links.unreliable(SECONDS + 3.0)) == {frozenset("ab")}
    links.record_failure("a", "b", 99, 2 * SECONDS)
    assert links.unreliable(2 * SECONDS) == {}, "what failed before is forgotten"
