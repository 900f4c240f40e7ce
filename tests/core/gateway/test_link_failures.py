"""Failures of a link between two servers: counted by generation, and up to a number."""

from __future__ import annotations

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
