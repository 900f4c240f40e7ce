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
    seconds_since_epoch,
    timestamp,
)
from modelswarm_operator.reconcile.state.observed import Json
from modelswarm_operator.reconcile.state.policy import Policy

_LONGEST = 400  # characters of a failure's words that are kept ...
_SHORT = 100  # ... when more slots than ...
_MANY = 100  # ... this have something to remember


@dataclass(frozen=True, slots=True)
class SlotMemory:
    allocated: int = 0  # incarnation that was stored and whose pod was not yet seen; 0: none
    failures: int = 0  # since a server of this slot was last stable
    not_before: float = 0.0
    last_failure: str = ""

    @property
    def is_empty(self) -> bool:
        return self == SlotMemory()

    def without_allocation(self) -> SlotMemory:
        return replace(self, promised=0)

    def with_allocation(self, incarnation: int) -> SlotMemory:
        return replace(self, promised=incarnation)


def after_failure(
    history: SlotMemory, message: str, policy: Policy, now: float, budget_spent: bool
) -> SlotMemory:
    """The first failure is made good at once, each further one after twice the time; without budget, all wait."""
    failures = history.failures + 1
    doubled = policy.backoff_base * 2.0 ** min(failures - 2, 20)
    wait = policy.backoff_limit if budget_spent else min(doubled, policy.backoff_limit)
    delay = 0.0 if failures == 1 and not budget_spent else wait
    # Whole seconds, as they are stored: what is read back must be what was decided.
    return SlotMemory(history.allocated, failures, float(int(now + delay)), message[:_LONGEST])


def read_status(stored: Json) -> Status:
    """Fields that make no sense are left out one by one: what a hand broke must not take the counter with it."""
    try:
        return Status.read(stored)
    except ValidationError as error:
        broken = {str(fault["loc"][0]) for fault in error.errors() if fault["loc"]}
        return Status.read({key: value for key, value in stored.items() if key not in broken})


def slots_of(status: Status) -> dict[str, SlotMemory]:
    return {slot.slot: _memory(slot) for slot in status.slots}


def _memory(slot: SlotStatus) -> SlotMemory:
    return SlotMemory(
        allocated=slot.incarnation,
        failures=slot.failures,
        not_before=_moment(slot.not_before),
        last_failure=slot.last_failure or "",
    )


def _moment(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        return seconds_since_epoch(text)
    except ValueError:
        return 0.0


def slot_statuses(slots: Mapping[str, SlotMemory]) -> tuple[SlotStatus, ...]:
    """Without what is zero, and in few words when many fail: a thousand servers must fit into one object."""
    max_message = _LONGEST if len(slots) <= _MANY else _SHORT
    return tuple(
        _slot_status(name, slots[name], max_message) for name in sorted(slots) if not slots[name].is_empty
    )


def _slot_status(name: str, history: SlotMemory, max_message: int) -> SlotStatus:
    fields: Json = {"slot": name}
    if history.allocated:
        fields["incarnation"] = history.allocated
    if history.failures:
        fields["failures"] = history.failures
        fields["not_before"] = timestamp(history.not_before)
        fields["last_failure"] = history.last_failure[:max_message]
    return SlotStatus(**fields)
