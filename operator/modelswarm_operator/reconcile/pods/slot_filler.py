"""Keeps every wanted slot filled: allocates and creates missing pods, deletes useless ones, counts failures.

Called once per turn by `serving_swarm`. Never waits for a rollout, a scaling or a new plan: those only say which slots
are wanted and which may be replaced. Deletes no pod that serves.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import NodeState, Server
from modelswarm_operator.reconcile.pods.slot_state import SlotState, classify_slot, failure_of
from modelswarm_operator.reconcile.state.names import SlotKey, parse_slot
from modelswarm_operator.reconcile.state.observed import Json
from modelswarm_operator.reconcile.state.policy import Policy
from modelswarm_operator.reconcile.state.turn import Turn

BuildPod = Callable[[SlotKey, int], Json]
"""Builds the manifest of a slot's pod with this incarnation."""


@dataclass(frozen=True, slots=True)
class ServersBySlot:
    """All servers, those of the current plan by slot."""

    slots: Mapping[SlotKey, Sequence[Server]]  # of the current plan
    from_older_plan: tuple[Server, ...]  # of an earlier plan or another model


def group_by_slot(servers: Iterable[Server], layout: Layout) -> ServersBySlot:
    slots: dict[SlotKey, list[Server]] = {}
    from_older_plan = []
    for server in servers:
        span = server.slot.span
        known = span < len(layout.blocks) and server.model_hash == layout.model_hash
        if known and server.blocks == layout.blocks[span]:
            slots.setdefault(server.slot, []).append(server)
        else:
            from_older_plan.append(server)
    return ServersBySlot(slots, tuple(from_older_plan))


def slot_states(
    by_slot: ServersBySlot, known_slots: Iterable[str], layout: Layout, policy: Policy
) -> list[list[SlotState]]:
    """Return, by span, the state of every slot that has pods or a history."""
    keys = {slot for name in known_slots if (slot := parse_slot(name)) is not None}
    states: list[list[SlotState]] = [[] for _ in layout.spans]
    for key in sorted(keys | set(by_slot.slots)):
        if key.span < len(states):
            states[key.span].append(classify_slot(key, by_slot.slots.get(key, ()), layout, policy))
    return states


def choose_slots(
    span: int, states: Sequence[SlotState], wanted: int, limit: int
) -> list[SlotState]:
    """Return the best existing slots, at most `limit`. Free ordinals are added up to `wanted`.

    A serving slot is never given up for one that does not serve, and an existing slot never for a lower ordinal.
    """
    best = sorted(states, key=_preference_order)[:limit]
    taken = {state.key.ordinal for state in states}
    free = (ordinal for ordinal in count() if ordinal not in taken)
    while len(best) < wanted:
        best.append(empty_slot(SlotKey(span, next(free))))
    return sorted(best, key=lambda state: state.key)


def empty_slot(key: SlotKey) -> SlotState:
    return SlotState(key, None, None, (), (), (), (), (), (), None)


def _preference_order(state: SlotState) -> tuple[bool, bool, bool, int]:
    return (state.current is None, not state.is_serving, not state.is_live, state.key.ordinal)


class SlotFiller:
    def __init__(
        self, turn: Turn, rejected: Mapping[str, str], build_pod: BuildPod, pools: int
    ) -> None:
        self._turn, self._rejected, self._build_pod, self._pools = turn, rejected, build_pod, pools

    def fill_slots(self, chosen: Iterable[SlotState], replace: Container[SlotKey]) -> None:
        """Fill these slots; those in `replace` although a pod of an older template serves there."""
        for state in chosen:
            self._delete_useless(state)
            if state.current is not None:
                self._record_success(state, state.current)
            elif state.candidate is None:
                self._fill_slot(state, state.key in replace)
            elif self._leave_full_pool(state.candidate):
                self._fill_slot(state, replace=True)  # in this turn, which knows the full pool

    def _leave_full_pool(self, candidate: Server) -> bool:
        """Delete the candidate if it waited too long for a node of its pool and there is another pool."""
        if self._pools < 2 or not candidate.pod.unschedulable:
            return False
        moment = candidate.pod.created + self._turn.policy.pool_timeout
        if self._turn.now < moment:
            self._turn.requeue_at(moment)
            return False
        self._turn.delete_pod(candidate.pod, f"pool {candidate.pool} has no room; another is tried")
        return True

    def _delete_useless(self, state: SlotState) -> None:
        for server in state.failed:
            self._turn.delete_pod(server.pod, "its container has exited")
        for server in state.broken:
            self._turn.delete_pod(server.pod, "its container keeps failing")
        for server in state.redundant:
            self._turn.delete_pod(server.pod, "not serving; its slot has another server")

    def _record_success(self, state: SlotState, server: Server) -> None:
        """Clear the allocation, rejections and, once the server has run for `stable_after`, the slot's failures."""
        slot, turn = str(state.key), self._turn
        turn.record_success(slot)
        history = turn.history_of(slot)
        if history.failures:
            started = server.pod.container.running_since or 0.0
            # A time in the future was written by a clock that was ahead: it counts as long ago.
            latest = turn.now + turn.policy.backoff_limit
            known = (moment for moment in (started, history.not_before) if moment <= latest)
            since = max(known, default=0.0)
            stable = min(since, turn.now) + turn.policy.stable_after
            if turn.now >= stable:
                turn.slots.pop(slot)
            else:
                turn.requeue_at(stable)

    def _fill_slot(self, state: SlotState, replace: bool) -> None:
        slot, turn = str(state.key), self._turn
        if not turn.is_in_flight(slot):
            failure = failure_of(state.newest, turn.policy) if state.newest is not None else ""
            if state.outdated and not failure and not replace:
                return
            if failure:
                turn.record_failure(slot, failure)
            self._record_replacement(state, failure, replace)
            turn.allocate(slot)
        turn.create_due(slot, self._rejected.get(slot, ""), lambda n: self._build_pod(state.key, n))

    def _record_replacement(self, state: SlotState, failure: str, replace: bool) -> None:
        """Record an Event for a replacement; the first fill of a slot is reported by conditions only."""
        if state.newest is None:
            return
        old = state.newest.pod
        if failure:
            self._turn.record_event(
                "Warning", "ServerFailed", f"Slot {state.key} gets a new server: {failure}"
            )
        elif replace and state.outdated:
            self._turn.record_event(
                "Normal",
                "Renewing",
                f"Slot {state.key}: a server of the new spec starts beside {old.name}",
            )
        else:
            reason = _loss_reason(state.newest)
            self._turn.record_event(
                "Normal", "Replacing", f"Slot {state.key} gets a new server: {reason}"
            )


def _loss_reason(server: Server) -> str:
    name, node = server.pod.name, server.pod.node
    if server.is_terminating:
        how = f" ({server.pod.disruption})" if server.pod.disruption else ""
        return f"pod {name} is being deleted{how}"
    return {
        NodeState.DELETED: f"node {node} of pod {name} is deleted",
        NodeState.UNREACHABLE: f"node {node} of pod {name} is not ready",
        NodeState.DEPARTING: f"node {node} of pod {name} is departing",
    }.get(server.node_state, f"pod {name} can't serve")
