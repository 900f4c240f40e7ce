"""What one turn decides, gathered while it decides: promises, creates, deletes, words, and when to look again.

Filled by `keeper`, `planner` and `inspection`, emptied by `reconcile`. Holds the one rule that no crash may break: a
pod is created only for an incarnation that the same turn stores first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from modelswarm_operator.reconcile.state.observed import (
    TAKEN,
    CreatePod,
    DeletePod,
    Json,
    LabelPod,
    PodView,
    Tell,
)
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.slot_history import SlotMemory, after_failure

REFUSED = "refused: "  # how a failure begins that the API server told
_MOST_TOLD = 8  # events of one kind in a turn; a mass failure is told in one


@dataclass(slots=True)
class Ledger:
    policy: Policy
    now: float
    slots: dict[str, SlotMemory]
    incarnation: int  # the highest ever given
    seen: frozenset[int]  # incarnations of all pods that are there
    budget: int  # failures of all slots together that are made good quickly
    creates: list[CreatePod] = field(default_factory=list)
    deletes: dict[str, DeletePod] = field(default_factory=dict)  # by pod name
    labels: list[LabelPod] = field(default_factory=list)
    tells: list[Tell] = field(default_factory=list)
    wake_at: float | None = None

    def memory(self, slot: str) -> SlotMemory:
        return self.slots.get(slot, SlotMemory())

    def remember(self, slot: str, memory: SlotMemory) -> None:
        if memory.empty:
            self.slots.pop(slot, None)
        else:
            self.slots[slot] = memory

    @property
    def failures(self) -> int:
        """Of pods: what the API server refuses to create makes no pod storm."""
        return sum(
            memory.failures
            for memory in self.slots.values()
            if not memory.last_failure.startswith(REFUSED)
        )

    @property
    def budget_spent(self) -> bool:
        return self.failures >= self.budget

    def fail(self, slot: str, words: str) -> None:
        """Exactly once per failed pod: the caller promises its successor in the same turn."""
        memory = self.memory(slot)
        self.remember(slot, after_failure(memory, words, self.policy, self.now, self.budget_spent))

    def forgive(self) -> None:
        """Nothing waits any more, and no failure counts; promises stay."""
        for slot, memory in list(self.slots.items()):
            self.remember(slot, SlotMemory(promised=memory.promised))

    def refuse(self, slot: str, words: str) -> None:
        """Once per attempt: the caller tries again in the same turn."""
        self.fail(slot, REFUSED + words)
        self.look_at(self.memory(slot).not_before)

    def due(self, slot: str) -> bool:
        """Whether the slot's wait is over. One that is longer than any that is given was written by another clock:
        a clock that was set back must not turn minutes into hours."""
        wait = self.memory(slot).not_before - self.now
        if 0.0 < wait <= self.policy.backoff_limit:
            self.look_at(self.memory(slot).not_before)
            return False
        return True

    def promise(self, slot: str) -> int:
        self.incarnation += 1
        self.remember(slot, self.memory(slot).promising(self.incarnation))
        return self.incarnation

    def outstanding(self, slot: str) -> bool:
        """Whether a pod is promised that nobody has seen yet. One that was seen, wherever it is now, kept its promise:
        the slot may have been another's then, by an earlier plan."""
        promised = self.memory(slot).promised
        return promised > 0 and promised not in self.seen

    def forget_promise(self, slot: str) -> None:
        self.remember(slot, self.memory(slot).kept_promise())

    def fulfil(self, slot: str, refused: str, make: Callable[[int], Json]) -> None:
        """Create the promised pod when its time has come. Repeating it is harmless: the name is taken then. By a pod
        of somebody else's, it would be for ever: the next try has another name."""
        if not self.due(slot):
            return
        if refused:
            self.refuse(slot, refused)
        if refused.endswith(TAKEN):
            self.promise(slot)
        self.creates.append(CreatePod(slot, make(self.memory(slot).promised)))

    def delete(self, pod: PodView, reason: str, grace_seconds: int | None = None) -> None:
        """Once: a pod that is on its way out is left to it, unless it is to be forced (grace 0)."""
        if pod.deleting_since is None or grace_seconds == 0:
            self.deletes.setdefault(pod.name, DeletePod(pod.name, pod.uid, reason, grace_seconds))

    def look_at(self, moment: float | None) -> None:
        if moment is not None and (self.wake_at is None or moment < self.wake_at):
            self.wake_at = moment

    def tell(self, kind: str, reason: str, message: str) -> None:
        self.tells.append(Tell(kind, reason, message))

    def told(self) -> list[Tell]:
        """Bounded: beyond a few of one reason, the rest is a number."""
        kept: list[Tell] = []
        counts: dict[str, int] = {}
        for tell in self.tells:
            counts[tell.reason] = counts.get(tell.reason, 0) + 1
            if counts[tell.reason] <= _MOST_TOLD:
                kept.append(tell)
        for reason, count in counts.items():
            if count > _MOST_TOLD:
                kind = next(tell.kind for tell in self.tells if tell.reason == reason)
                kept.append(Tell(kind, reason, f"and {count - _MOST_TOLD} more at the same time"))
        return kept
