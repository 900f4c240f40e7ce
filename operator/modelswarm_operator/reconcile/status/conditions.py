"""Ready, Progressing and Degraded by the Kubernetes conventions: written once per change, with the time of the change.

Called by `reconciler` at the end of a turn. Also makes the Kubernetes Events: one per transition, none per turn. The
rules for reasons and messages are in `condition_rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.resources.status import Condition, format_timestamp
from modelswarm_operator.reconcile.state.actions import RecordEvent

READY, PROGRESSING, DEGRADED = "Ready", "Progressing", "Degraded"
_MAX_MESSAGE = 2000  # characters of a condition


@dataclass(frozen=True, slots=True)
class ConditionUpdate:
    """One condition as this turn decided it."""

    type: str
    is_true: bool
    reason: str
    message: str


def apply_updates(
    updates: Sequence[ConditionUpdate], stored: Sequence[Condition], generation: int, now: float
) -> tuple[Condition, ...]:
    before = {condition.type: condition for condition in stored}
    return tuple(_condition(update, before.get(update.type), generation, now) for update in updates)


def _condition(
    update: ConditionUpdate, before: Condition | None, generation: int, now: float
) -> Condition:
    status = "True" if update.is_true else "False"
    same = before is not None and before.status == status and before.last_transition_time
    return Condition(
        type=update.type,
        status=status,  # type: ignore[arg-type]  # two of its three values
        reason=update.reason,
        message=update.message[:_MAX_MESSAGE],
        last_transition_time=before.last_transition_time
        if same and before
        else format_timestamp(now),
        observed_generation=generation,
    )


def transition_events(
    updates: Sequence[ConditionUpdate], stored: Sequence[Condition]
) -> list[RecordEvent]:
    """Return an Event for each condition whose status changed, or whose reason changed while it is bad."""
    before = {condition.type: condition for condition in stored}
    return [
        event
        for update in updates
        if (event := _transition_event(update, before.get(update.type))) is not None
    ]


def _transition_event(update: ConditionUpdate, before: Condition | None) -> RecordEvent | None:
    was = before is not None and before.status == "True"
    if was == update.is_true and (before is None or before.reason == update.reason):
        return None
    if update.type == DEGRADED:
        if update.is_true:
            return RecordEvent("Warning", update.reason, update.message[:1000])
        return RecordEvent("Normal", "Recovered", update.message[:1000]) if was else None
    if update.type == READY and was != update.is_true:
        reason = "Ready" if update.is_true else "NotReady"
        return RecordEvent("Normal" if update.is_true else "Warning", reason, update.message[:1000])
    if update.type == PROGRESSING and update.is_true and not was:
        return RecordEvent("Normal", update.reason, update.message[:1000])
    return None
