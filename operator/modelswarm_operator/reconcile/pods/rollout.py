"""Planned changes: rolls, scaling, new spans, departing nodes. Says what may be started and which serving pods may go.

Called once per turn beside `keeper`. Nothing here removes a pod that serves unless, for each of its blocks, enough
others serve; so a change that goes wrong stops by itself and leaves what is good.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from modelswarm.resources.spec import Spec
from modelswarm_operator.reconcile.pods.inventory import NodeState, Server
from modelswarm_operator.reconcile.pods.slot_filler import ServersBySlot
from modelswarm_operator.reconcile.pods.slot_state import SlotState
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.turn import REJECTED_PREFIX, Turn


def fillable_slots(spec: Spec, by_slot: ServersBySlot, spans: int) -> int:
    """Slots per span that may be filled now: all, or, while servers of an earlier plan serve, those that serve and
    `surge` more."""
    if not any(server.is_serving for server in by_slot.from_older_plan):
        return spec.replicas
    serving = [0] * spans
    for key, servers in by_slot.slots.items():
        serving[key.span] += any(server.is_serving for server in servers)
    return min(spec.replicas, min(serving) + max(1, spec.rollout.surge))


def slots_to_replace(states: Sequence[SlotState], spec: Spec, turn: Turn) -> set[SlotKey]:
    """Slots of one span whose pod of an older recipe gets a successor beside it. At most `surge` are on their way at
    once, counting every slot of the span that is not at rest: a recipe that fails stops the roll."""
    waiting = [state for state in states if _is_outdated(state, turn)]
    busy = sum(not _is_settled(state) for state in states) - len(waiting)
    room = max(1, spec.rollout.surge) - busy
    if _replaces_in_place(spec) or room <= 0:
        return set()
    return {state.key for state in waiting[:room]}


def _replaces_in_place(spec: Spec) -> bool:
    """Without surge the old one goes first; the only server of a span never does."""
    return spec.rollout.surge == 0 and spec.replicas > 1


def _is_settled(state: SlotState) -> bool:
    return state.current is not None and not (state.outdated or state.departing or state.extra)


def _is_unschedulable(state: SlotState) -> bool:
    """Its next pod finds no node."""
    return state.candidate is not None and bool(state.candidate.pod.unschedulable)


def _is_rejected(state: SlotState, turn: Turn) -> bool:
    """Its next pod is not taken by the API server (a quota that is used up)."""
    words = turn.history_of(str(state.key)).last_failure
    return state.current is None and state.candidate is None and words.startswith(REJECTED_PREFIX)


def _is_outdated(state: SlotState, turn: Turn) -> bool:
    """Served by an older recipe, with no successor on its way."""
    return (
        bool(state.outdated)
        and state.current is None
        and state.candidate is None
        and not state.failed
        and not state.broken
        and not turn.is_in_flight(str(state.key))
    )


def coverage_by_block(servers: Iterable[Server], blocks: int) -> list[int]:
    """How many of these serve each block."""
    steps = [0] * (blocks + 1)
    for server in servers:
        if server.is_serving:
            first, last = block_range(server, blocks)
            steps[first] += 1
            steps[last] -= 1
    return list(accumulate(steps))[:blocks]


class Retirement:
    """Removes serving pods one by one, as long as the blocks they leave stay covered."""

    def __init__(self, servers: Iterable[Server], blocks: int, turn: Turn, grace: int) -> None:
        self._turn, self._grace = turn, grace
        staying = (server for server in servers if server.pod.name not in turn.deletes)
        self._coverage = coverage_by_block(staying, blocks)

    def retire(self, server: Server, floor: int, reason: str) -> bool:
        """Whether it may go: `floor` others serve each of its blocks."""
        if server.pod.name in self._turn.deletes:
            return True
        first, last = block_range(server, len(self._coverage))
        if server.is_serving:
            if any(others <= floor for others in self._coverage[first:last]):
                return False
            for block in range(first, last):
                self._coverage[block] -= 1
        self._turn.delete_pod(server.pod, reason, self._grace)
        return True


def block_range(server: Server, blocks: int) -> tuple[int, int]:
    """Its blocks, cut to the model's (an earlier plan may have been for another model)."""
    first, _, last = server.blocks.partition(":")
    if not (first.isdigit() and last.isdigit()):
        return 0, 0
    return min(int(first), blocks), min(int(last), blocks)


def retire_replaced(
    chosen: Sequence[SlotState], spec: Spec, retirement: Retirement, turn: Turn
) -> None:
    """Of one span's slots: what a winner makes superfluous, and what goes first when there is no surge."""
    # A pod that waits for room gets it from what is superfluous, or both would wait for ever.
    waiting = sum(_is_unschedulable(state) for state in chosen)
    floor = max(1, spec.replicas - waiting)
    for state in chosen:
        if state.current is not None:
            winner = state.current.pod.name
            for server in state.outdated:
                retirement.retire(server, floor, f"replaced by {winner} of the new spec")
            for server in state.departing:
                retirement.retire(server, floor, f"its node will go; {winner} took its place")
            for server in state.extra:
                retirement.retire(server, floor, f"not needed beside {winner}")
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
    """Pods in slots that are too many."""
    for server in servers:
        if server.is_terminating or _is_unreachable(server):
            continue
        retirement.retire(server, spec.replicas, f"{spec.replicas} servers per span are wanted")


def max_unschedulable(chosen: Iterable[Sequence[SlotState]]) -> int:
    """Of the wanted pods of one span, how many find no node."""
    return max((sum(_is_unschedulable(state) for state in states) for states in chosen), default=0)


def retire_older_plan(
    servers: Iterable[Server],
    spec: Spec,
    retirement: Retirement,
    model_hash: str,
    covered: bool,
    waiting: int,
) -> None:
    """Pods of an earlier plan, when those of today's serve their blocks, or wait for room that only these can give.
    Servers of another model can't stand in for one another, so those wait until today's alone are enough for a route
    (`covered`)."""
    floor = max(min(1, spec.replicas), spec.replicas - waiting)
    for server in servers:
        if server.is_terminating or _is_unreachable(server):
            continue
        if server.is_serving and server.model_hash != model_hash and not covered:
            continue
        retirement.retire(server, floor, "of an earlier plan")


def _is_unreachable(server: Server) -> bool:
    """On a node that may come back: decided then."""
    return server.is_alive and server.node_state in (NodeState.UNREACHABLE, NodeState.UNREADY)
