"""Rollout: rolling update of a swarm's pods, and other planned changes (scaling, new plans, departing nodes).

Called once per turn beside `slot_filler`. Decides which slots may be replaced and which serving pods may be deleted.
Deletes a serving pod only if, for each of its blocks, enough others serve. So a rollout that goes wrong stops by itself
and leaves the good pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from modelswarm.resources.spec import Spec
from modelswarm_operator.reconcile.pods.inventory import NodeState, Server
from modelswarm_operator.reconcile.pods.slot_filler import ServersBySlot
from modelswarm_operator.reconcile.pods.slot_state import SlotState
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.turn import Turn


def fillable_slots(spec: Spec, by_slot: ServersBySlot, spans: int) -> int:
    """Return how many slots per span may be filled now.

    All; or, while servers of an earlier plan serve, those that serve and `surge` more.
    """
    if not any(server.is_serving for server in by_slot.from_older_plan):
        return spec.replicas
    serving = [0] * spans
    for key, servers in by_slot.slots.items():
        serving[key.span] += any(server.is_serving for server in servers)
    return min(spec.replicas, min(serving) + max(1, spec.rollout.surge))


def slots_to_replace(states: Sequence[SlotState], spec: Spec, turn: Turn) -> set[SlotKey]:
    """Return the slots of one span whose pod of an older template gets a successor beside it.

    At most `surge` slots of the span are unsettled at a time, so a template that fails stops the rollout. A server
    whose node departs does not wait for its turn: a spot notice leaves two minutes.
    """
    if _replaces_in_place(spec):
        return set()
    waiting = [state for state in states if _is_outdated(state, turn)]
    departing = {state.key for state in waiting if _is_departing(state)}
    busy = sum(not _is_settled(state) for state in states) - len(waiting) + len(departing)
    room = max(0, max(1, spec.rollout.surge) - busy)
    return departing.union([one.key for one in waiting if one.key not in departing][:room])


def _replaces_in_place(spec: Spec) -> bool:
    """Without surge the old pod is deleted first, but never the only server of a span."""
    return spec.rollout.surge == 0 and spec.replicas > 1


def _is_departing(state: SlotState) -> bool:
    """Return True if all servers of an older template in this slot are on nodes that will be removed."""
    return all(one.node_state is NodeState.DEPARTING for one in state.outdated)


def _is_settled(state: SlotState) -> bool:
    return state.current is not None and not (state.outdated or state.departing or state.extra)


def _is_unschedulable(state: SlotState) -> bool:
    """Return True if the slot's next pod finds no node."""
    return state.candidate is not None and bool(state.candidate.pod.unschedulable)


def _is_rejected(state: SlotState, turn: Turn) -> bool:
    """Return True if the API server rejects the slot's next pod (a quota that is used up)."""
    has_pod = state.current is not None or state.candidate is not None
    return not has_pod and turn.history_of(str(state.key)).rejections > 0


def _is_outdated(state: SlotState, turn: Turn) -> bool:
    """Return True if a pod of an older template serves and no successor is on its way."""
    return (
        bool(state.outdated)
        and state.current is None
        and state.candidate is None
        and not state.failed
        and not state.broken
        and not turn.is_in_flight(str(state.key))
    )


def coverage_by_model(servers: Iterable[Server], blocks: int) -> dict[str, list[int]]:
    """Return the serving servers of each block of each model, by its hash: all servers of a route have one model.

    `blocks`: the number for a model whose pods do not tell it.
    """
    by_model: dict[str, list[Server]] = {}
    for server in servers:
        if server.is_serving:
            by_model.setdefault(server.model_hash, []).append(server)
    return {
        model_hash: _coverage_by_block(group, max(one.model_blocks for one in group) or blocks)
        for model_hash, group in by_model.items()
    }


def _coverage_by_block(serving: Iterable[Server], blocks: int) -> list[int]:
    steps = [0] * (blocks + 1)
    for server in serving:
        first, last = block_range(server, blocks)
        steps[first] += 1
        steps[last] -= 1
    return list(accumulate(steps))[:blocks]


class Retirement:
    """Deletes serving pods one by one, as long as their blocks stay covered by others."""

    def __init__(self, servers: Iterable[Server], blocks: int, turn: Turn, grace: int) -> None:
        self._blocks, self._turn, self._grace = blocks, turn, grace
        staying = (server for server in servers if server.pod.name not in turn.deletes)
        self._coverage = coverage_by_model(staying, blocks)

    def is_needed(self, server: Server, kept: int) -> bool:
        """Return True if without it less than `kept` others of its model serve one of its blocks."""
        own = self._coverage.get(server.model_hash)
        if own is None:
            return True
        first, last = block_range(server, len(own))
        return any(each - server.is_serving < kept for each in own[first:last])

    def retire(self, server: Server, floor: int, reason: str) -> None:
        """Delete the pod if at least `floor` others serve each of its blocks; of other models, whole routes count."""
        if server.pod.name in self._turn.deletes:
            return
        if server.is_serving or server.may_return:
            none = [0] * (server.model_blocks or self._blocks)
            own = self._coverage.setdefault(server.model_hash, none)
            routes = sum(min(each) for each in self._coverage.values() if each is not own)
            first, last = block_range(server, len(own))
            if any(each - server.is_serving + routes < floor for each in own[first:last]):
                return
            for block in range(first, last):
                own[block] -= server.is_serving
        self._turn.delete_pod(server.pod, reason, self._grace)


def block_range(server: Server, blocks: int) -> tuple[int, int]:
    """Return its blocks [first, last), cut to the model's: an earlier plan may have been for another model."""
    first, _, last = server.blocks.partition(":")
    if not (first.isdigit() and last.isdigit()):
        return 0, 0
    return min(int(first), blocks), min(int(last), blocks)


def retire_replaced(
    chosen: Sequence[SlotState], spec: Spec, retirement: Retirement, turn: Turn
) -> None:
    """Delete, in one span, pods beside a current one and, without surge, pods that must make room for the new spec."""
    # A pod without a node gets the room of a superfluous one; otherwise both would wait for ever.
    waiting = sum(_is_unschedulable(state) for state in chosen)
    floor = max(1, spec.replicas - waiting)
    for state in chosen:
        if state.current is not None:
            successor = state.current.pod.name
            for server in state.outdated:
                retirement.retire(server, floor, f"replaced by {successor} of the new spec")
            for server in state.departing:
                retirement.retire(
                    server, floor, f"its node is departing; {successor} took its place"
                )
            for server in state.extra:
                retirement.retire(server, floor, f"not needed beside {successor}")
    if _replaces_in_place(spec):
        stuck = [
            state
            for state in chosen
            if state.outdated and (_is_unschedulable(state) or _is_rejected(state, turn))
        ]
        untouched = [state for state in chosen if _is_outdated(state, turn)]
        busy = sum(not _is_settled(state) for state in chosen) - len(stuck) - len(untouched)
        for state in [*stuck, *untouched][: max(0, 1 - busy)]:
            for server in state.outdated:
                retirement.retire(server, max(1, spec.replicas - 1), "makes room for the new spec")


def retire_surplus(servers: Iterable[Server], spec: Spec, retirement: Retirement) -> None:
    """Delete pods in slots that are not wanted."""
    for server in servers:
        if server.is_terminating or _is_unreachable(server):
            continue
        retirement.retire(server, spec.replicas, f"{spec.replicas} servers per span are desired")


def max_waiting(chosen: Iterable[Sequence[SlotState]], spec: Spec, turn: Turn) -> int:
    """Return the largest number of pods of one span that find no node or, without surge, that a quota refuses."""

    def waits(state: SlotState) -> bool:
        return _is_unschedulable(state) or (_replaces_in_place(spec) and _is_rejected(state, turn))

    return max((sum(map(waits, states)) for states in chosen), default=0)


def retire_older_plan(
    servers: Sequence[Server],
    spec: Spec,
    retirement: Retirement,
    model_hash: str,
    routes: Mapping[str, int],
    waiting: int,
) -> None:
    """Delete pods of an earlier plan when current ones serve their blocks, or wait for room that only these can give.

    `routes`: complete routes of each model. Servers of different models cannot share one, so those of another model
    stay until the current ones alone form one. A model that forms none serves no session, and gives its room away. One
    that does gives away what it has above the replicas or, without surge, above one less.
    """
    floor = max(min(1, spec.replicas), spec.replicas - waiting)
    covered = spec.replicas == 0 or routes.get(model_hash, 0) > 0
    returning = {one.model_hash for one in servers if one.may_return or _is_unreachable(one)}
    for server in servers:
        if server.is_terminating or _is_unreachable(server):
            continue
        least = floor
        may_serve = server.is_serving or server.may_return
        if may_serve and server.model_hash != model_hash and not covered:
            has_route = routes.get(server.model_hash, 0) > 0 or server.model_hash in returning
            kept = max(1, spec.replicas - _replaces_in_place(spec))
            if not waiting or (has_route and retirement.is_needed(server, kept)):
                continue
            least = 0
        retirement.retire(server, least, "of an earlier plan")


def _is_unreachable(server: Server) -> bool:
    """Return True if its node is NotReady and may come back: the pod stays until that is known."""
    return server.is_alive and server.node_state in (NodeState.UNREACHABLE, NodeState.UNREADY)
