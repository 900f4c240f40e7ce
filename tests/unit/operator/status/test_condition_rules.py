"""Condition rules alone: each reason and sentence, and which one comes first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from modelswarm.resources.status import Condition, SpanStatus
from modelswarm_operator.reconcile.status.condition_rules import (
    SwarmSummary,
    condition_updates,
    describe_starts,
)
from modelswarm_operator.reconcile.status.conditions import DEGRADED, PROGRESSING, READY
from modelswarm_operator.reconcile.status.problems import Problem
from modelswarm_operator.reconcile.status.status import ReadyCounts

CALM = SwarmSummary(
    ReadyCounts((), coverage=1),
    problems=(),
    is_paused=False,
    is_suspended=False,
    is_held=False,
    is_inspecting=False,
    from_older_plan=0,
    outdated=0,
    surplus=0,
)
READY_ONCE = [Condition(type=READY, status="True", reason="AllServersReady")]
CRASH = Problem("Crashing", "It crashes.")
RESERVED = Problem("PodTemplateReserved", "This field is the operator's.")


def counts(*ready: int, desired: int = 2) -> ReadyCounts:
    """Return the counts of spans of one block each, with that many ready servers."""
    spans = (
        SpanStatus(index=at, blocks=f"{at}:{at + 1}", ready=each, desired=desired)
        for at, each in enumerate(ready)
    )
    return ReadyCounts(tuple(spans), min(ready, default=0))


def decide(
    part: str, stored: list[Condition] | None = None, **changes: Any
) -> tuple[bool, str, str]:
    updates = condition_updates(replace(CALM, **changes), stored or [])
    assert [each.type for each in updates] == [READY, PROGRESSING, DEGRADED]
    [update] = [each for each in updates if each.type == part]
    return update.is_true, update.reason, update.message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ready_counts": counts(2, 2)}, (True, "AllServersReady", "All 4 servers are ready.")),
        (
            {"ready_counts": counts(1, 2), "starts": ["a loads"]},
            (True, "Covered", "Every block has a ready server; 1 of 4 servers are missing. a loads."),
        ),
        (
            {"ready_counts": counts(0), "is_suspended": True, "problems": [CRASH]},
            (False, "Suspended", "spec.replicas is 0: no servers are desired."),
        ),
        ({"ready_counts": counts(0), "problems": [CRASH]}, (False, "Crashing", "It crashes.")),
        (
            {"ready_counts": counts(0), "problems": [RESERVED], "starts": ["a loads"]},
            (False, "Starting", "No server is ready yet for blocks 0:1. a loads."),
        ),
        (
            {"ready_counts": counts(), "is_inspecting": True, "is_paused": True},
            (False, "Inspecting", "A pod inspects the model before servers are planned."),
        ),
        (
            {"ready_counts": counts(), "is_paused": True},
            (False, "Paused", "spec.paused is true: nothing is started."),
        ),
        (
            {"ready_counts": counts(0), "is_paused": True},
            (False, "Starting", "No server is ready yet for blocks 0:1."),
        ),
        (
            {"ready_counts": counts(0, 1, 0), "starts": ["a loads"]},
            (False, "Starting", "No server is ready yet for blocks 0:1, 2:3. a loads."),
        ),
        (
            {"ready_counts": counts(0, 0, 0, 0)},
            (False, "Starting", "No server is ready yet for blocks 0:1, 1:2, 2:3, 3:4."),
        ),
        (
            {"ready_counts": counts(0, 0, 0, 0, 0)},
            (False, "Starting", "No server is ready yet for blocks 0:1, 1:2, 2:3, 3:4 …."),
        ),
        ({"ready_counts": counts()}, (False, "Starting", "No server is ready yet for blocks 0:….")),
    ],
)  # fmt: skip
def test_ready_of_a_swarm_that_never_was(
    changes: dict[str, Any], expected: tuple[bool, str, str]
) -> None:
    assert decide(READY, **changes) == expected


def test_lost_coverage_names_the_span_and_the_first_problem() -> None:
    lost: dict[str, Any] = {"ready_counts": counts(0, 2), "starts": ["a loads"]}
    no_server = "No ready server holds blocks 0:1"
    assert decide(READY, READY_ONCE, **lost) == (
        False, "SpanUncovered", f"{no_server} any more. a loads.",
    )  # fmt: skip
    stored = [Condition(type=READY, status="False", reason="SpanUncovered")]
    lost["problems"] = [CRASH]
    assert decide(READY, stored, **lost) == (
        False, "SpanUncovered", f"{no_server} any more. a loads. It crashes.",
    )  # fmt: skip
    degraded = decide(DEGRADED, stored, **lost)
    assert degraded[:2] == (True, "Crashing")
    assert degraded[2].startswith("It crashes.") and f"{no_server}; sessions wait." in degraded[2]
    assert decide(DEGRADED, stored, **lost | {"problems": []}) == (
        True, "SpanUncovered", f"{no_server}; sessions wait.",
    )  # fmt: skip
    calm = (False, "AsExpected", "Nothing needs attention.")
    assert decide(DEGRADED, READY_ONCE, ready_counts=counts(0), is_suspended=True) == calm
    assert decide(DEGRADED, [], ready_counts=counts(0)) == calm
    assert decide(DEGRADED, READY_ONCE, ready_counts=counts(1)) == calm


def test_warning_about_chats_is_complete() -> None:
    _, _, message = decide(READY, ready_counts=counts(2), chat_warning="No chats.")
    assert message == "All 2 servers are ready. No chats."
    long = decide(READY, ready_counts=counts(1), starts=["x" * 2000], chat_warning="No chats.")[2]
    assert len(long) == 1300 + len(" No chats.") and long.endswith("x No chats.")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"is_paused": True, "is_inspecting": True},
            (False, "Paused", "spec.paused is true: nothing is started, replaced or deleted."),
        ),
        (
            {"is_inspecting": True, "is_held": True},
            (True, "Inspecting", "A pod inspects the model."),
        ),
        (
            {"is_held": True, "from_older_plan": 1},
            (False, "Held", "Nothing is started or deleted until the spec is corrected; running pods stay."),
        ),
        (
            {"from_older_plan": 3, "outdated": 1},
            (True, "Replanning", "3 pods of the earlier plan are deleted as soon as the new ones serve."),
        ),
        (
            {"outdated": 2, "ready_counts": counts(1)},
            (True, "Rolling", "2 servers still have the old spec; they are replaced in turn."),
        ),
        (
            {"ready_counts": counts(1, 0), "surplus": 1, "starts": ["a loads"]},
            (True, "Filling", "1 of 4 servers are ready. a loads."),
        ),
        (
            {"ready_counts": counts(2), "surplus": 2},
            (True, "Shrinking", "2 pods that are not needed are terminating."),
        ),
        ({"ready_counts": counts(2)}, (False, "Settled", "The swarm matches its spec.")),
    ],
)  # fmt: skip
def test_progressing(changes: dict[str, Any], expected: tuple[bool, str, str]) -> None:
    assert decide(PROGRESSING, **changes) == expected


@pytest.mark.parametrize(
    ("starts", "sentence"),
    [
        ([], ""),
        (["b", "a"], " a; b."),
        (["c", "b", "a"], " a; b; c."),
        (["d", "c", "b", "a"], " a; b; c; and 1 more."),
    ],
)
def test_first_three_starts_are_described(starts: list[str], sentence: str) -> None:
    assert describe_starts(starts) == sentence
