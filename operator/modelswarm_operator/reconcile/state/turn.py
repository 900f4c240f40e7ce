"""The decisions of one turn while they are made: allocations, creates, deletes, Events, and the time of the next turn.

Filled by `slot_filler`, `rollout` and `inspection`, emptied by `reconciler`. Holds the one rule that no crash may
break: a pod is created only for an incarnation that the same turn stores first. Knows no client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod, LabelPod, RecordEvent
from modelswarm_operator.reconcile.state.observed import NAME_TAKEN, Json, PodView
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.slot_history import (
    SlotHistory,
    after_failure,
    after_rejection,
)

REJECTED_PREFIX = "refused: "  # begins the failure message of a create that the API server rejected
_MAX_EVENTS = 8  # Events with one reason in a turn; the rest is summed up in one more


@dataclass(slots=True)
class Turn:
    policy: Policy
    now: float
    slots: dict[str, SlotHistory]
    incarnation: int  # the highest ever allocated
    seen_incarnations: frozenset[int]  # incarnations of all pods that exist
    failure_budget: int  # failures of all slots together that are replaced quickly
    creates: list[CreatePod] = field(default_factory=list)
    deletes: dict[str, DeletePod] = field(default_factory=dict)  # by pod name
    labels: list[LabelPod] = field(default_factory=list)
    recorded_events: list[RecordEvent] = field(default_factory=list)
    next_requeue: float | None = None

    def history_of(self, slot: str) -> SlotHistory:
        return self.slots.get(slot, SlotHistory())

    def store_history(self, slot: str, history: SlotHistory) -> None:
        if history.is_empty:
            self.slots.pop(slot, None)
        else:
            self.slots[slot] = history

    @property
    def failures(self) -> int:
        """Number of failed pods. Rejected creates do not count: they cause no storm of pods."""
        return sum(history.failures for history in self.slots.values())

    @property
    def is_budget_spent(self) -> bool:
        return self.failures >= self.failure_budget

    def record_failure(self, slot: str, message: str) -> None:
        """Called exactly once per failed pod: the caller allocates its successor in the same turn."""
        history = self.history_of(slot)
        self.store_history(
            slot, after_failure(history, message, self.policy, self.now, self.is_budget_spent)
        )

    def reset_failures(self) -> None:
        """Clear all waits and failure counts; allocations stay."""
        for slot, history in list(self.slots.items()):
            self.store_history(slot, SlotHistory(allocated=history.allocated))

    def record_rejection(self, slot: str, message: str) -> None:
        """Called once per attempt: the caller tries again in the same turn."""
        history, message = self.history_of(slot), REJECTED_PREFIX + message
        self.store_history(
            slot, after_rejection(history, message, self.policy, self.now, self.is_budget_spent)
        )
        self.requeue_at(self.history_of(slot).not_before)

    def rejection_of(self, slot: str, told: str) -> str:
        """Return the API server's reason for its last rejection; "" if there is none.

        `told`: the reason that this process was told. A process that has just begun to lead knows the status only.
        """
        history = self.history_of(slot)
        stored = history.last_failure.removeprefix(REJECTED_PREFIX) if history.rejections else ""
        return told or stored

    def is_due(self, slot: str) -> bool:
        """Return True if the slot's wait is over; else requeue for its end.

        A wait longer than `backoff_limit` was written by another clock and counts as over. A clock that was set back
        must not turn minutes into hours.
        """
        wait = self.history_of(slot).not_before - self.now
        if 0.0 < wait <= self.policy.backoff_limit:
            self.requeue_at(self.history_of(slot).not_before)
            return False
        return True

    def allocate(self, slot: str) -> int:
        self.incarnation += 1
        self.store_history(slot, self.history_of(slot).with_allocation(self.incarnation))
        return self.incarnation

    def is_in_flight(self, slot: str) -> bool:
        """Return True if a pod is allocated that was not seen yet.

        A pod that was seen in any slot fulfils its allocation: an earlier plan may have had it in another slot.
        """
        allocated = self.history_of(slot).allocated
        return allocated > 0 and allocated not in self.seen_incarnations

    def record_success(self, slot: str) -> None:
        self.store_history(slot, self.history_of(slot).with_success())

    def create_due(self, slot: str, rejection: str, build_pod: Callable[[int], Json]) -> None:
        """Create the pod of the stored incarnation once its back-off is over.

        Repeating is safe (AlreadyExists). If the name belongs to another owner's pod, allocate the next incarnation.
        """
        if not self.is_due(slot):
            return
        if rejection:
            self.record_rejection(slot, rejection)
        if rejection.endswith(NAME_TAKEN):
            self.allocate(slot)
        self.creates.append(CreatePod(slot, build_pod(self.history_of(slot).allocated)))

    def delete_pod(self, pod: PodView, reason: str, grace_seconds: int | None = None) -> None:
        """Delete a pod once; one that is terminating is deleted again only by force (grace 0)."""
        if pod.deleting_since is None or grace_seconds == 0:
            self.deletes.setdefault(pod.name, DeletePod(pod.name, pod.uid, reason, grace_seconds))

    def requeue_at(self, moment: float | None) -> None:
        if moment is not None and (self.next_requeue is None or moment < self.next_requeue):
            self.next_requeue = moment

    def record_event(self, kind: str, reason: str, message: str) -> None:
        self.recorded_events.append(RecordEvent(kind, reason, message))

    def events(self) -> list[RecordEvent]:
        """Return the Events, at most `_MAX_EVENTS` for each reason and one more with the number of the others."""
        kept: list[RecordEvent] = []
        counts: dict[str, int] = {}
        for event in self.recorded_events:
            counts[event.reason] = counts.get(event.reason, 0) + 1
            if counts[event.reason] <= _MAX_EVENTS:
                kept.append(event)
        for reason, count in counts.items():
            if count > _MAX_EVENTS:
                kind = next(event.kind for event in self.recorded_events if event.reason == reason)
                kept.append(
                    RecordEvent(kind, reason, f"and {count - _MAX_EVENTS} more at the same time")
                )
        return kept
