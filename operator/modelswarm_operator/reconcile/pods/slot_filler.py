"""Keeps every wanted slot filled: promises and creates what is missing, removes what can't help, counts failures.

Called once per turn and never waits for a roll, a scale or a new plan to end: those only tell it how many slots there
are and which may be renewed. Removes no pod that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import Ground, Server
from modelswarm_operator.reconcile.pods.slot_state import SlotState, failure_of, state_of
from modelswarm_operator.reconcile.state.names import SlotKey, parse_slot
from modelswarm_operator.reconcile.state.observed import Json
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.turn import Ledger

Make = Callable[[SlotKey, int], Json]
"""The pod of a slot with this incarnation."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """All servers, sorted by where they belong."""

    slots: Mapping[SlotKey, Sequence[Server]]  # of the wanted spans
    foreign: tuple[Server, ...]  # of an earlier plan


def rank(servers: Iterable[Server], layout: Layout) -> Ranks:
    slots: dict[SlotKey, list[Server]] = {}
    foreign = []
    for server in servers:
        span = server.slot.span
        known = span < len(layout.blocks) and server.generation == layout.generation
        if known and server.blocks == layout.blocks[span]:
            slots.setdefault(server.slot, []).append(server)
        else:
            foreign.append(server)
    return Ranks(slots, tuple(foreign))


def states_of(
    ranks: Ranks, remembered: Iterable[str], layout: Layout, policy: Policy
) -> list[list[SlotState]]:
    """Of every slot that has pods or something to remember, span by span."""
    keys = {slot for name in remembered if (slot := parse_slot(name)) is not None}
    states: list[list[SlotState]] = [[] for _ in layout.spans]
    for key in sorted(keys | set(ranks.slots)):
        if key.span < len(states):
            states[key.span].append(state_of(key, ranks.slots.get(key, ()), layout, policy))
    return states


def choose(span: int, states: Sequence[SlotState], wanted: int, most: int) -> list[SlotState]:
    """The best `most` slots there are; up to `wanted`, free ordinals are added.

    What serves is never given up for what does not, and what is there never for a lower number.
    """
    best = sorted(states, key=_merit)[:most]
    taken = {state.key.ordinal for state in states}
    free = (ordinal for ordinal in count() if ordinal not in taken)
    while len(best) < wanted:
        best.append(empty_slot(SlotKey(span, next(free))))
    return sorted(best, key=lambda state: state.key)


def empty_slot(key: SlotKey) -> SlotState:
    return SlotState(key, None, None, (), (), (), (), (), (), None)


def _merit(state: SlotState) -> tuple[bool, bool, bool, int]:
    return (state.settled is None, not state.serving, not state.live, state.key.ordinal)


class Keeper:
    def __init__(self, ledger: Ledger, refused: Mapping[str, str], make: Make, pools: int) -> None:
        self._ledger, self._refused, self._make, self._pools = ledger, refused, make, pools

    def keep(self, chosen: Iterable[SlotState], renew: Container[SlotKey]) -> None:
        """Fill these slots; those of `renew` although a pod of an older recipe serves there."""
        for state in chosen:
            self._tidy(state)
            if state.settled is not None:
                self._rest(state, state.settled)
            elif state.hope is None or self._give_up(state.hope):
                self._fill(state, state.key in renew)

    def _give_up(self, hope: Server) -> bool:
        """Whether it waited long enough for a node of its pool, and another pool may have one."""
        if self._pools < 2 or not hope.pod.unschedulable:
            return False
        moment = hope.pod.created + self._ledger.policy.pool_patience
        if self._ledger.now < moment:
            self._ledger.look_at(moment)
            return False
        self._ledger.delete(hope.pod, f"pool {hope.pool} has no room; another is tried")
        return True

    def _tidy(self, state: SlotState) -> None:
        for server in state.failed:
            self._ledger.delete(server.pod, "it has ended")
        for server in state.broken:
            self._ledger.delete(server.pod, "its container keeps failing")
        for server in state.idle:
            self._ledger.delete(server.pod, "not serving, and another takes its slot")

    def _rest(self, state: SlotState, winner: Server) -> None:
        """All is well: the promise is kept, and after a while old failures no longer count."""
        slot, ledger = str(state.key), self._ledger
        ledger.forget_promise(slot)
        memory = ledger.memory(slot)
        if memory.failures:
            started = winner.pod.container.running_since or 0.0
            # What is yet to come was told by a clock that was ahead: long ago, as far as this one knows.
            latest = ledger.now + ledger.policy.backoff_limit
            known = (moment for moment in (started, memory.not_before) if moment <= latest)
            since = max(known, default=0.0)
            stable = min(since, ledger.now) + ledger.policy.stable_after
            if ledger.now >= stable:
                ledger.slots.pop(slot)
            else:
                ledger.look_at(stable)

    def _fill(self, state: SlotState, renew: bool) -> None:
        slot, ledger = str(state.key), self._ledger
        if not ledger.outstanding(slot):
            failure = failure_of(state.newest, ledger.policy) if state.newest is not None else ""
            if state.outdated and not failure and not renew:
                return
            if failure:
                ledger.fail(slot, failure)
            self._tell(state, failure, renew)
            ledger.promise(slot)
        ledger.fulfil(slot, self._refused.get(slot, ""), lambda n: self._make(state.key, n))

    def _tell(self, state: SlotState, failure: str, renew: bool) -> None:
        """Only replacements: how a swarm begins is told by its conditions."""
        if state.newest is None:
            return
        old = state.newest.pod
        if failure:
            self._ledger.tell(
                "Warning", "ServerFailed", f"Slot {state.key} gets a new server: {failure}"
            )
        elif renew and state.outdated:
            self._ledger.tell(
                "Normal",
                "Renewing",
                f"Slot {state.key}: a server by the new spec is started beside {old.name}",
            )
        else:
            why = _loss(state.newest)
            self._ledger.tell("Normal", "Replacing", f"Slot {state.key} gets a new server: {why}")


def _loss(server: Server) -> str:
    name, node = server.pod.name, server.pod.node
    if server.leaving:
        how = f" ({server.pod.disruption})" if server.pod.disruption else ""
        return f"pod {name} is being deleted{how}"
    return {
        Ground.GONE: f"node {node} of pod {name} is gone",
        Ground.LOST: f"node {node} of pod {name} is not ready",
        Ground.DEPARTING: f"node {node} of pod {name} is about to go",
    }.get(server.ground, f"pod {name} can't serve")
