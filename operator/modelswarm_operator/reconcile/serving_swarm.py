"""One turn for a swarm whose model and plan are known: keeper, planner, children, and what is wrong.

Called by `reconcile`. Puts the pieces in their order; the rules are in the modules it calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from modelswarm.resources.spec import Spec
from modelswarm_operator.reconcile.manifests.manifests import Maker, drain_seconds
from modelswarm_operator.reconcile.manifests.owned_objects import child_actions
from modelswarm_operator.reconcile.manifests.pod_builder import PodMaker
from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import PodInventory, NodeState, Server
from modelswarm_operator.reconcile.pods.rollout import (
    Retirement,
    cover_of,
    most_waiting,
    retire_beside,
    retire_foreign,
    retire_unwanted,
    startable,
    to_renew,
)
from modelswarm_operator.reconcile.pods.slot_filler import SlotFiller, ServersBySlot, choose_slots, group_by_slot, slot_states
from modelswarm_operator.reconcile.pods.slot_state import SlotState
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import ApplyChild, DeleteChild, LabelPod, Observed
from modelswarm_operator.reconcile.state.turn import REJECTED_PREFIX, Turn
from modelswarm_operator.reconcile.status.pod_diagnosis import Doctor
from modelswarm_operator.reconcile.status.problems import Problem, node_problems, refusal, stuck_at

Chosen = Sequence[Sequence[SlotState]]  # the wanted slots, span by span


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was found on the way; what was decided is in the ledger."""

    problems: tuple[Problem, ...]
    children: tuple[ApplyChild | DeleteChild, ...]
    foreign: int  # pods of an earlier plan that are still there
    outdated: int  # servers of an older recipe
    surplus: int  # other pods that are to go


def keep_up(
    observed: Observed, maker: Maker, spec: Spec, layout: Layout, fleet: PodInventory, ledger: Turn
) -> Upkeep:
    _clear(fleet, ledger)
    ranks = group_by_slot(fleet.servers, layout)
    chosen = _chosen(spec, layout, ranks, ledger)
    make = PodMaker(maker, spec, layout, fleet)
    keeper = SlotFiller(ledger, observed.rejected, make, len(layout.pools))
    for states, renew in [(states, to_renew(states, spec, ledger)) for states in chosen]:
        keeper.fill_slots(states, renew)
    unwanted = _unwanted(ranks, chosen)
    _retire(spec, layout, fleet, ledger, chosen, unwanted, ranks.from_older_plan)
    children = child_actions(
        maker, observed.children, observed.rejected, ledger, len(layout.spans), spec.replicas
    )
    return Upkeep(
        problems=tuple(_problems(observed, spec, layout, fleet, ledger, chosen)),
        children=tuple(children),
        foreign=len(ranks.from_older_plan),
        outdated=sum(len(state.outdated) for states in chosen for state in states),
        surplus=sum(one.is_terminating for one in fleet.servers)
        + sum(not one.is_terminating for one in unwanted),
    )


def _clear(fleet: PodInventory, ledger: Turn) -> None:
    """What needs no plan to be put right."""
    for server in fleet.servers:
        if server.node_state is NodeState.DELETED:
            ledger.delete_pod(server.pod, "its node is gone", 0)
    for pod in fleet.orphans:
        ledger.delete_pod(pod, "it fills no slot")
    for pod, right in fleet.mislabelled:
        ledger.labels.append(LabelPod(pod.name, pod.uid, right))
        if right.get(names.ROLE) == names.KEPT:
            ledger.record_event(
                "Normal", "Kept", f"Pod {pod.name} is left alone; its slot gets another server"
            )


def _chosen(spec: Spec, layout: Layout, ranks: ServersBySlot, ledger: Turn) -> list[list[SlotState]]:
    """The wanted slots; what was remembered of others is forgotten."""
    wanted = startable(spec, ranks, len(layout.spans))
    every = slot_states(ranks, ledger.slots, layout, ledger.policy)
    chosen = [choose_slots(span, states, wanted, spec.replicas) for span, states in enumerate(every)]
    keys = {str(state.key) for states in chosen for state in states}
    for slot in [one for one in ledger.slots if names.parse_slot(one) is not None]:
        if slot not in keys:
            ledger.slots.pop(slot)
    return chosen


def _unwanted(ranks: ServersBySlot, chosen: Chosen) -> list[Server]:
    keys = {state.key for states in chosen for state in states}
    return [one for key, servers in ranks.slots.items() if key not in keys for one in servers]


def _retire(spec: Spec, layout: Layout, fleet: PodInventory, ledger: Turn, chosen: Chosen,
            unwanted: Iterable[Server], foreign: Iterable[Server]) -> None:  # fmt: skip
    blocks = layout.spans[-1].last
    today = [one for one in fleet.servers if one.model_hash == layout.generation]
    covered = spec.replicas == 0 or min(cover_of(today, blocks)) > 0
    retirement = Retirement(fleet.servers, blocks, ledger, drain_seconds(spec))
    for states in chosen:
        retire_beside(states, spec, retirement, ledger)
    retire_unwanted(unwanted, spec, retirement)
    waiting = most_waiting(chosen)
    retire_foreign(foreign, spec, retirement, layout.generation, covered, waiting)


def _problems(observed: Observed, spec: Spec, layout: Layout, fleet: PodInventory, ledger: Turn,
              chosen: Chosen) -> list[Problem]:  # fmt: skip
    limits = {
        pool.name: str(pool.resources.limits["memory"])
        for pool in layout.pools
        if "memory" in pool.resources.limits
    }
    drain = float(drain_seconds(spec))
    found = Doctor(ledger, observed.nodes, limits).servers(fleet.servers)
    found += node_problems(fleet, ledger.policy, ledger.now, drain)
    ledger.requeue_at(stuck_at(fleet.servers, ledger.policy, ledger.now, drain))
    for states in chosen:
        found += _empty_slots(states, ledger, observed.rejected)
    for what, why in observed.rejected.items():
        if "/" in what and what in ledger.slots:  # else it is right by now, or not wanted
            found.append(refusal(what.replace("/", " "), why))
    if ledger.is_budget_spent:
        found.append(_budget_problem(ledger))
    return found


def _empty_slots(
    states: Iterable[SlotState], ledger: Turn, rejected: Mapping[str, str]
) -> list[Problem]:
    found = []
    for state in states:
        slot = str(state.key)
        memory = ledger.history_of(slot)
        if state.current is not None or state.candidate is not None:
            continue
        if refused := rejected.get(slot, ""):
            found.append(refusal(f"The pod of slot {slot}", refused))
        elif memory.failures and not memory.last_failure.startswith(REJECTED_PREFIX):
            said = f"Slot {slot} failed {memory.failures} times; last: {memory.last_failure}"
            found.append(Problem("ServersFailing", said, slot))
    return found


def _budget_problem(ledger: Turn) -> Problem:
    last = max(ledger.slots.values(), key=lambda memory: memory.not_before).last_failure
    return Problem(
        "RestartBudgetUsedUp",
        f"{ledger.failures} servers failed, which is more than what is replaced quickly; each further one waits "
        f"{ledger.policy.backoff_limit:.0f} s. Last: {last}. When the cause is mended, annotate the swarm with "
        f"{names.RECONCILE_AT} to try at once.",
    )
