"""The operator's own records in the status, read back: allocated incarnations, failures, last plan, conditions.

Called at the start of each turn. A status that cannot be read (restored, edited by hand, of another version) counts as
empty: everything can be found again from the pods. Knows no client.
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

_MAX_MESSAGE = 400  # characters of a failure's message that are kept
_MANY_SLOTS = 100  # more slots with a history than this get shorter messages
_MAX_MESSAGE_OF_MANY = 100  # characters of a message then


@dataclass(frozen=True, slots=True)
class SlotHistory:
    allocated: int = 0  # incarnation that is stored and whose pod was not seen yet; 0: none
    failures: int = 0  # since a server of this slot was last stable
    not_before: float = 0.0
    last_failure: str = ""
    rejections: int = 0  # creates in a row that the API server rejected; no pod failed

    @property
    def is_empty(self) -> bool:
        return self == SlotHistory()

    def with_success(self) -> SlotHistory:
        """Return the history without allocation and rejections; failures are kept for some time."""
        return replace(self, allocated=0, rejections=0) if self.failures else SlotHistory()

    def with_allocation(self, incarnation: int) -> SlotHistory:
        return replace(self, allocated=incarnation)


def after_failure(
    history: SlotHistory, message: str, policy: Policy, now: float, budget_spent: bool
) -> SlotHistory:
    """Return the history with one failure more.

    The first failure is replaced at once, each further one after twice the time; without budget, after the longest.
    """
    failures = history.failures + 1
    not_before = _end_of_wait(failures, policy, now, budget_spent)
    return SlotHistory(history.allocated, failures, not_before, message[:_MAX_MESSAGE])


def after_rejection(
    history: SlotHistory, message: str, policy: Policy, now: float, budget_spent: bool
) -> SlotHistory:
    """Return the history with one rejected create more, and pauses that grow as after failures; those stay."""
    rejections = history.rejections + 1
    not_before = _end_of_wait(rejections, policy, now, budget_spent)
    return SlotHistory(
        history.allocated, history.failures, not_before, message[:_MAX_MESSAGE], rejections
    )


def _end_of_wait(number: int, policy: Policy, now: float, budget_spent: bool) -> float:
    doubled = policy.backoff_base * 2.0 ** min(number - 2, 20)
    wait = policy.backoff_limit if budget_spent else min(doubled, policy.backoff_limit)
    delay = 0.0 if number == 1 and not budget_spent else wait
    # Whole seconds, as they are stored, so that the stored value equals the decided one.
    return float(int(now + delay))


def read_status(stored: Json) -> Status:
    """Leave out invalid fields one by one, so that an edit by hand of one does not lose the incarnation counter."""
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
        rejections=slot.rejections,
    )


def _seconds_of(text: str | None) -> float:
    if text is None:
        return 0.0
    try:
        return parse_timestamp(text)
    except ValueError:
        return 0.0


def slot_statuses(slots: Mapping[str, SlotHistory]) -> tuple[SlotStatus, ...]:
    """Leave out what is zero and shorten messages when many slots failed: 1,000 servers must fit into one object."""
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
    if history.rejections:
        fields["rejections"] = history.rejections
    if history.failures or history.rejections:
        fields["not_before"] = format_timestamp(history.not_before)
        fields["last_failure"] = history.last_failure[:max_message]
    return SlotStatus(**fields)
