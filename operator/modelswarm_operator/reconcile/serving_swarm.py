"""One turn of a swarm whose model and plan are known: fill slots, roll out, owned objects, problems.

Called by `reconciler`. Only puts the steps in order; the rules are in the modules it calls.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelswarm.resources.spec import Spec
from modelswarm_operator.reconcile.manifests.manifests import ManifestBuilder, drain_seconds
from modelswarm_operator.reconcile.manifests.owned_objects import child_actions
from modelswarm_operator.reconcile.manifests.pod_builder import PodBuilder
from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import NodeState, PodInventory, Server
from modelswarm_operator.reconcile.pods.rollout import (
    Retirement,
    coverage_by_model,
    fillable_slots,
    max_waiting,
    retire_older_plan,
    retire_replaced,
    retire_surplus,
    slots_to_replace,
)
from modelswarm_operator.reconcile.pods.slot_filler import (
    ServersBySlot,
    SlotFiller,
    choose_slots,
    group_by_slot,
    slot_states,
)
from modelswarm_operator.reconcile.pods.slot_state import SlotState
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import ApplyChild, DeleteChild, LabelPod
from modelswarm_operator.reconcile.state.observed import Observed
from modelswarm_operator.reconcile.state.turn import REJECTED_PREFIX, Turn
from modelswarm_operator.reconcile.status.memory_advice import MemoryAdvice
from modelswarm_operator.reconcile.status.pod_diagnosis import PodDiagnosis
from modelswarm_operator.reconcile.status.problems import (
    Problem,
    next_stuck_at,
    node_problems,
    rejection,
)

WantedSlots = Sequence[Sequence[SlotState]]  # the wanted slots by span


@dataclass(frozen=True, slots=True)
class ServingResult:
    """The findings of the turn; its decisions are in `Turn`."""

    problems: tuple[Problem, ...]
    children: tuple[ApplyChild | DeleteChild, ...]
    from_older_plan: int  # pods of an earlier plan that still exist
    outdated: int  # servers of an older pod template
    surplus: int  # other pods that are to be deleted


def reconcile_serving(
    observed: Observed,
    builder: ManifestBuilder,
    spec: Spec,
    layout: Layout,
    inventory: PodInventory,
    turn: Turn,
) -> ServingResult:
    _clean_up(inventory, turn)
    by_slot = group_by_slot(inventory.servers, layout)
    chosen = _wanted_slots(spec, layout, by_slot, turn)
    make = PodBuilder(builder, spec, layout, inventory)
    filler = SlotFiller(turn, observed.rejected, make, len(layout.pools))
    for states, replace in [(states, slots_to_replace(states, spec, turn)) for states in chosen]:
        filler.fill_slots(states, replace)
    surplus = _surplus_servers(by_slot, chosen)
    _retire(spec, layout, inventory, turn, chosen, surplus, by_slot.from_older_plan)
    # Servers of an earlier plan serve until new ones do: a drain of their nodes must wait too.
    older = {one.slot.span for one in by_slot.from_older_plan if one.is_alive}
    spans = sorted(older.union(range(len(layout.spans))))
    children = child_actions(
        builder, observed.children, observed.rejected, turn, spans, spec.replicas
    )
    return ServingResult(
        problems=tuple(_find_problems(observed, spec, layout, inventory, turn, chosen)),
        children=tuple(children),
        from_older_plan=len(by_slot.from_older_plan),
        outdated=sum(len(state.outdated) for states in chosen for state in states),
        surplus=sum(one.is_terminating for one in inventory.servers)
        + sum(not one.is_terminating for one in surplus),
    )


def suspend_servers(
    observed: Observed, builder: ManifestBuilder, spec: Spec, inventory: PodInventory, turn: Turn
) -> ServingResult:
    """Delete the servers of a swarm of 0 replicas whose model or plan is not known."""
    _clean_up(inventory, turn)
    retirement = Retirement(inventory.servers, 1, turn, drain_seconds(spec))
    retire_surplus(inventory.servers, spec, retirement)
    _forget_slots(turn, ())
    children = child_actions(builder, observed.children, observed.rejected, turn, (), 0)
    return ServingResult((), tuple(children), 0, 0, len(inventory.servers))


def _clean_up(inventory: PodInventory, turn: Turn) -> None:
    """Correct everything that needs no plan."""
    for server in inventory.servers:
        if server.node_state is NodeState.DELETED:
            turn.delete_pod(server.pod, "its node does not exist any more", 0)
    for pod in inventory.orphans:
        turn.delete_pod(pod, "it fills no slot")
    for pod, right in inventory.mislabelled:
        turn.labels.append(LabelPod(pod.name, pod.uid, right))
        if right.get(names.ROLE) == names.KEPT:
            turn.record_event(
                "Normal",
                "Kept",
                f"Pod {pod.name} is kept out of service; its slot gets another server",
            )


def _wanted_slots(
    spec: Spec, layout: Layout, by_slot: ServersBySlot, turn: Turn
) -> list[list[SlotState]]:
    """Return the wanted slots and drop the history of all others."""
    wanted = fillable_slots(spec, by_slot, len(layout.spans))
    every = slot_states(by_slot, turn.slots, layout, turn.policy)
    chosen = [
        choose_slots(span, states, wanted, spec.replicas) for span, states in enumerate(every)
    ]
    _forget_slots(turn, {str(state.key) for states in chosen for state in states})
    return chosen


def _forget_slots(turn: Turn, kept: Container[str]) -> None:
    """Drop the history of all other slots of servers."""
    for slot in [one for one in turn.slots if names.parse_slot(one) is not None]:
        if slot not in kept:
            turn.slots.pop(slot)


def _surplus_servers(by_slot: ServersBySlot, chosen: WantedSlots) -> list[Server]:
    keys = {state.key for states in chosen for state in states}
    return [one for key, servers in by_slot.slots.items() if key not in keys for one in servers]


def _retire(spec: Spec, layout: Layout, inventory: PodInventory, turn: Turn, chosen: WantedSlots,
            surplus: Iterable[Server], from_older_plan: Sequence[Server]) -> None:  # fmt: skip
    blocks = layout.spans[-1].last
    covers = coverage_by_model(inventory.servers, blocks)
    routes = {model_hash: min(cover) for model_hash, cover in covers.items()}
    retirement = Retirement(inventory.servers, blocks, turn, drain_seconds(spec))
    for states in chosen:
        retire_replaced(states, spec, retirement, turn)
    retire_surplus(surplus, spec, retirement)
    waiting = max_waiting(chosen, spec, turn)
    retire_older_plan(from_older_plan, spec, retirement, layout.model_hash, routes, waiting)


def _find_problems(observed: Observed, spec: Spec, layout: Layout, inventory: PodInventory, turn: Turn,
              chosen: WantedSlots) -> list[Problem]:  # fmt: skip
    memory = MemoryAdvice.for_plan(spec, layout.spans, layout.max_length)
    drain = float(drain_seconds(spec))
    found = PodDiagnosis(turn, observed.nodes, memory).diagnose_servers(inventory.servers)
    found += node_problems(inventory, turn.policy, turn.now, drain)
    turn.requeue_at(next_stuck_at(inventory.servers, turn.policy, turn.now, drain))
    for states in chosen:
        found += _empty_slot_problems(states, turn, observed.rejected)
    for what in [one for one in turn.slots if "/" in one]:  # others are correct, or not wanted
        if why := turn.rejection_of(what, observed.rejected.get(what, "")):
            found.append(rejection(what.replace("/", " "), why))
    if turn.is_budget_spent:
        found.append(_budget_problem(turn))
    return found


def _empty_slot_problems(
    states: Iterable[SlotState], turn: Turn, rejected: Mapping[str, str]
) -> list[Problem]:
    found = []
    for state in states:
        slot = str(state.key)
        history = turn.history_of(slot)
        if state.current is not None or state.candidate is not None:
            continue
        if refused := turn.rejection_of(slot, rejected.get(slot, "")):
            found.append(rejection(f"The pod of slot {slot}", refused))
        elif history.failures and not history.last_failure.startswith(REJECTED_PREFIX):
            message = f"Slot {slot} failed {history.failures} times; last: {history.last_failure}"
            found.append(Problem("ServersFailing", message, slot))
    return found


def _budget_problem(turn: Turn) -> Problem:
    last = max(turn.slots.values(), key=lambda history: history.not_before).last_failure
    return Problem(
        "RestartBudgetUsedUp",
        f"{turn.failures} servers failed, which is more than what is replaced quickly; each further one waits "
        f"{turn.policy.backoff_limit:.0f} s. Last: {last}. When the cause is fixed, annotate the swarm with "
        f"{names.RECONCILE_AT} to try at once.",
    )
