"""What the operator wrote down in status, read back: promises, failures, the last plan and conditions.

Called at the start of each turn. A status that makes no sense (restored, hand-edited, of another version) is an empty
one: everything can be found again from the pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from modelswarm.resources.status import (
    SlotStatus,
    Status,
    format_timestamp,
    parse_timestamp,
)
from modelswarm_operator.reconcile.state.observed import Json
from modelswarm_operator.reconcile.state.policy import Policy

_MAX_MESSAGE = 400  # characters of a failure's words that are kept ...
_MAX_MESSAGE_OF_MANY = 100  # ... when more slots than ...
_MANY_SLOTS = 100  # ... this have something to remember


@dataclass(frozen=True, slots=True)
class SlotHistory:
    allocated: int = 0  # incarnation that was stored and whose pod was not yet seen; 0: none
    failures: int = 0  # since a server of this slot was last stable
    not_before: float = 0.0
    last_failure: str = ""

    @property
    def is_empty(self) -> bool:
        return self == SlotHistory()

    def without_allocation(self) -> SlotHistory:
        return replace(self, allocated=0)

    def with_allocation(self, incarnation: int) -> SlotHistory:
        return replace(self, allocated=incarnation)


def after_failure(
    history: SlotHistory, message: str, policy: Policy, now: float, budget_spent: bool
) -> SlotHistory:
    """The first failure is made good at once, each further one after twice the time; without budget, all wait."""
    failures = history.failures + 1
    doubled = policy.backoff_base * 2.0 ** min(failures - 2, 20)
    wait = policy.backoff_limit if budget_spent else min(doubled, policy.backoff_limit)
    delay = 0.0 if failures == 1 and not budget_spent else wait
    # Whole seconds, as they are stored: what is read back must be what was decided.
    return SlotHistory(history.allocated, failures, float(int(now + delay)), message[:_MAX_MESSAGE])


def read_status(stored: Json) -> Status:
    """Fields that make no sense are left out one by one: what a hand broke must not take the counter with it."""
    try:
        return Status.from_stored(stored)
    except ValidationError as error:
        broken = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
        return Status.from_stored(
            {key: value for key, value in stored.items() if key not in broken}
        )


def slot_histories(status: Status) -> dict[str, SlotHistory]:
    return {slot.slot: _history_of(slot) for slot in status.slots}


def _history_of(slot: SlotStatus) -> SlotHistory:
    return SlotHistory(
        allocated=slot.incarnation,
        failures=slot.failures,
        not_before=_seconds_of(slot.not_before),
        last_failure=slot.last_failure or "",
    )


def _seconds_of(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        return parse_timestamp(text)
    except ValueError:
        return 0.0


def slot_statuses(slots: Mapping[str, SlotHistory]) -> tuple[SlotStatus, ...]:
    """Without what is zero, and in few words when many fail: a thousand servers must fit into one object."""
    max_message = _MAX_MESSAGE if len(slots) <= _MANY_SLOTS else _MAX_MESSAGE_OF_MANY
    return tuple(
        _slot_status(name, slots[name], max_message)
        for name in sorted(slots)
        if not slots[name].is_empty
    )


def _slot_status(name: str, history: SlotHistory, max_message: int) -> SlotStatus:
    fields: Json = {"slot": name}
    if history.allocated:
        fields["incarnation"] = history.allocated
    if history.failures:
        fields["failures"] = history.failures
        fields["not_before"] = format_timestamp(history.not_before)
        fields["last_failure"] = history.last_failure[:max_message]
    return SlotStatus(**fields)
