"""Breadth-first search of the ownership model: all states within the bounds of a world, or the shortest way to a fault.

Used by `tests/core/ownership`. A search is exhaustive if its outcome `is_complete` and has no fault.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from support.ownership_model.actions import is_within, successors
from support.ownership_model.invariants import fault_of, is_at_rest
from support.ownership_model.state import Gateway, Message, State, World, initial


@dataclass(frozen=True, slots=True)
class Search:
    """The outcome. `at_rest`: states that were judged as such; `cut_off`: events that led beyond the bounds."""

    states: int
    at_rest: int
    cut_off: int
    depth: int
    cpu_seconds: float
    fault: str = ""
    path: tuple[str, ...] = ()  # events that lead to the fault
    is_complete: bool = True


def explore(world: World, max_states: int = 10_000_000, prefix: tuple[str, ...] = ()) -> Search:
    """Visit all states breadth first. Stop at the first one that breaks an invariant, or after `max_states`.

    `prefix`: events that lead to the first state. A plant that needs many events is then found among few states.
    """
    began = time.process_time()
    start = initial(world)
    for event in prefix:
        start = next(after for label, after in successors(start, world) if label == event)
    parents: dict[State, tuple[State, str] | None] = {start: None}
    level, depth, at_rest, cut_off = [start], 0, 0, 0
    while level:
        following: list[State] = []
        for state in level:
            if fault := fault_of(state):
                path = _path(parents, state)
                seconds = time.process_time() - began
                return Search(len(parents), at_rest, cut_off, depth, seconds, fault, path)
            at_rest += is_at_rest(state)
            for label, after in successors(state, world):
                if after in parents or (not world.pipeline and mirrored(after) in parents):
                    continue
                if not is_within(after, world):
                    cut_off += 1
                    continue
                parents[after] = state, label
                following.append(after)
        if len(parents) > max_states:
            seconds = time.process_time() - began
            return Search(len(parents), at_rest, cut_off, depth, seconds, is_complete=False)
        level, depth = following, depth + 1
    return Search(len(parents), at_rest, cut_off, depth, time.process_time() - began)


def mirrored(state: State) -> State:
    """Return the state with its two servers exchanged: replicas of one range of blocks are equivalent."""
    lanes = state.lanes
    swapped: tuple[tuple[Message, ...], ...] = ()
    for first in range(0, len(lanes), 6):
        swapped += (*lanes[first + 3 : first + 6], *lanes[first : first + 3])
    return state._replace(
        gateways=tuple(map(_mirrored_gateway, state.gateways)),
        servers=state.servers[::-1],
        lanes=swapped,
        holders=state.holders[::-1],
    )


def _mirrored_gateway(g: Gateway) -> Gateway:
    query = g.query
    if query is not None:
        query = query._replace(route=query.route[::-1], unanswered=query.unanswered[::-1])
    return g._replace(views=g.views[::-1], closing=g.closing[::-1], query=query)


def _path(parents: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    labels: list[str] = []
    while (before := parents[state]) is not None:
        state, label = before
        labels.append(label)
    return tuple(reversed(labels))
