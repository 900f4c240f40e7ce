"""Ready, Progressing and Degraded, by the Kubernetes conventions: written once per change, with the time of change.

Called by `reconcile` at the end of a turn. Also makes the Kubernetes Events: one per transition, none per turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.resources.status import Condition, timestamp
from modelswarm_operator.reconcile.state.observed import Tell

READY, PROGRESSING, DEGRADED = "Ready", "Progressing", "Degraded"
_LONGEST = 2000


@dataclass(frozen=True, slots=True)
class Verdict:
    """One condition as this turn sees it."""

    type: str
    true: bool
    reason: str
    message: str


def conditions_of(
    verdicts: Sequence[Verdict], stored: Sequence[Condition], generation: int, now: float
) -> tuple[Condition, ...]:
    before = {condition.type: condition for condition in stored}
    return tuple(
        _condition(verdict, before.get(verdict.type), generation, now) for verdict in verdicts
    )


def _condition(
    verdict: Verdict, before: Condition | None, generation: int, now: float
) -> Condition:
    status = "True" if verdict.true else "False"
    same = before is not None and before.status == status and before.last_transition_time
    return Condition(
        type=verdict.type,
        status=status,  # type: ignore[arg-type]  # two of its three words
        reason=verdict.reason,
        message=verdict.message[:_LONGEST],
        last_transition_time=before.last_transition_time if same and before else timestamp(now),
        observed_generation=generation,
    )


def transitions(verdicts: Sequence[Verdict], stored: Sequence[Condition]) -> list[Tell]:
    """Events for what changed: the status of a condition, or the reason for which it is bad."""
    before = {condition.type: condition for condition in stored}
    return [
        tell
        for verdict in verdicts
        if (tell := _transition(verdict, before.get(verdict.type))) is not None
    ]


def _transition(verdict: Verdict, before: Condition | None) -> Tell | None:
    was = before is not None and before.status == "True"
    if was == verdict.true and (before is None or before.reason == verdict.reason):
        return None
    if verdict.type == DEGRADED:
        if verdict.true:
            return Tell("Warning", verdict.reason, verdict.message[:1000])
        return Tell("Normal", "Recovered", verdict.message[:1000]) if was else None
    if verdict.type == READY and was != verdict.true:
        reason = "Ready" if verdict.true else "NotReady"
        return Tell("Normal" if verdict.true else "Warning", reason, verdict.message[:1000])
    if verdict.type == PROGRESSING and verdict.true and not was:
        return Tell("Normal", verdict.reason, verdict.message[:1000])
    return None
