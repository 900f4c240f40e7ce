"""What one turn decides, gathered while it decides: promises, creates, deletes, words, and when to look again.

Filled by `keeper`, `planner` and `inspection`, emptied by `reconcile`. Holds the one rule that no crash may break: a
pod is created only for an incarnation that the same turn stores first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from modelswarm_operator.reconcile.state.actions import CreatePod, DeletePod, LabelPod, RecordEvent
from modelswarm_operator.reconcile.state.observed import NAME_TAKEN, Json, PodView
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.slot_history import SlotHistory, after_failure

REJECTED_PREFIX = "refused: "  # how a failure begins that the API server told
_MAX_EVENTS = 8  # events of one kind in a turn; a mass failure is told in one


@dataclass(slots=True)
class Turn:
    policy: Policy
    now: float
    slots: dict[str, SlotHistory]
    incarnation: int  # the highest ever given
    seen_incarnations: frozenset[int]  # incarnations of all pods that are there
    failure_budget: int  # failures of all slots together that are made good quickly
    creates: list[CreatePod] = field(default_factory=list)
    deletes: dict[str, DeletePod] = field(default_factory=dict)  # by pod name
    labels: list[LabelPod] = field(default_factory=list)
    recorded_events: list[RecordEvent] = field(default_factory=list)
    next_requeue: float | None = None

    def history_of(self, slot: str) -> SlotHistory:
        return self.slots.get(slot, SlotHistory())

    def store_history(self, slot: str, memory: SlotHistory) -> None:
        if memory.is_empty:
            self.slots.pop(slot, None)
        else:
            self.slots[slot] = memory

    @property
    def failures(self) -> int:
        """Of pods: what the API server refuses to create makes no pod storm."""
        return sum(
            memory.failures
            for memory in self.slots.values()
            if not memory.last_failure.startswith(REJECTED_PREFIX)
        )

    @property
    def is_budget_spent(self) -> bool:
        return self.failures >= self.failure_budget

    def record_failure(self, slot: str, words: str) -> None:
        """Exactly once per failed pod: the caller promises its successor in the same turn."""
        memory = self.history_of(slot)
        self.store_history(
            slot, after_failure(memory, words, self.policy, self.now, self.is_budget_spent)
        )

    def reset_failures(self) -> None:
        """Nothing waits any more, and no failure counts; promises stay."""
        for slot, memory in list(self.slots.items()):
            self.store_history(slot, SlotHistory(allocated=memory.allocated))

    def record_rejection(self, slot: str, words: str) -> None:
        """Once per attempt: the caller tries again in the same turn."""
        self.record_failure(slot, REJECTED_PREFIX + words)
        self.requeue_at(self.history_of(slot).not_before)

    def is_due(self, slot: str) -> bool:
        """Whether the slot's wait is over. One that is longer than any that is given was written by another clock:
        a clock that was set back must not turn minutes into hours."""
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
        """Whether a pod is promised that nobody has seen yet. One that was seen, wherever it is now, kept its promise:
        the slot may have been another's then, by an earlier plan."""
        allocated = self.history_of(slot).allocated
        return allocated > 0 and allocated not in self.seen_incarnations

    def clear_allocation(self, slot: str) -> None:
        self.store_history(slot, self.history_of(slot).without_allocation())

    def create_due(self, slot: str, refused: str, build_pod: Callable[[int], Json]) -> None:
        """Create the promised pod when its time has come. Repeating it is harmless: the name is taken then. By a pod
        of somebody else's, it would be for ever: the next try has another name."""
        if not self.is_due(slot):
            return
        if refused:
            self.record_rejection(slot, refused)
        if refused.endswith(NAME_TAKEN):
            self.allocate(slot)
        self.creates.append(CreatePod(slot, build_pod(self.history_of(slot).allocated)))

    def delete_pod(self, pod: PodView, reason: str, grace_seconds: int | None = None) -> None:
        """Once: a pod that is on its way out is left to it, unless it is to be forced (grace 0)."""
        if pod.deleting_since is None or grace_seconds == 0:
            self.deletes.setdefault(pod.name, DeletePod(pod.name, pod.uid, reason, grace_seconds))

    def requeue_at(self, moment: float | None) -> None:
        if moment is not None and (self.next_requeue is None or moment < self.next_requeue):
            self.next_requeue = moment

    def record_event(self, kind: str, reason: str, message: str) -> None:
        self.recorded_events.append(RecordEvent(kind, reason, message))

    def events(self) -> list[RecordEvent]:
        """Bounded: beyond a few of one reason, the rest is a number."""
        kept: list[RecordEvent] = []
        counts: dict[str, int] = {}
        for tell in self.recorded_events:
            counts[tell.reason] = counts.get(tell.reason, 0) + 1
            if counts[tell.reason] <= _MAX_EVENTS:
                kept.append(tell)
        for reason, count in counts.items():
            if count > _MAX_EVENTS:
                kind = next(tell.kind for tell in self.recorded_events if tell.reason == reason)
                kept.append(
                    RecordEvent(kind, reason, f"and {count - _MAX_EVENTS} more at the same time")
                )
        return kept
