"""The decisions for a swarm that is being deleted: delete its pods, then remove the finalizer.

Called instead of everything else once the swarm has a deletion time. Never creates anything: under a foreground
deletion it would work against the garbage collector. Services and budgets are deleted through their owner reference.
"""

from __future__ import annotations

from modelswarm_operator.reconcile.manifests.manifests import drain_seconds
from modelswarm_operator.reconcile.pods.inventory import NodeState, PodInventory
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import SwarmView
from modelswarm_operator.reconcile.state.turn import Turn
from modelswarm_operator.reconcile.status.conditions import (
    DEGRADED,
    PROGRESSING,
    READY,
    ConditionUpdate,
)
from modelswarm_operator.reconcile.status.status import ReadyCounts

ORPHAN_FINALIZER = "orphan"  # the garbage collector's finalizer of `--cascade=orphan`


def is_protected(swarm: SwarmView) -> bool:
    return names.is_true(swarm.annotations.get(names.PROTECT))


def delete_pods(swarm: SwarmView, inventory: PodInventory, turn: Turn) -> bool:
    """Delete all pods; return True if the finalizer may be removed."""
    if ORPHAN_FINALIZER in swarm.finalizers:
        return True
    if is_protected(swarm):
        return False
    grace = drain_seconds(swarm.spec) if swarm.spec is not None else None
    on_deleted_nodes = {
        one.pod.name for one in inventory.servers if one.node_state is NodeState.DELETED
    }
    inspections = {pod.name for pod in inventory.inspections}
    pods = list(inventory.all_pods())
    for pod in pods:
        if pod.name in on_deleted_nodes:
            turn.delete_pod(pod, "its node does not exist any more", 0)
        else:
            # An inspection drains nothing and ignores SIGTERM: with a server's grace period it would go on that long.
            own = None if pod.name in inspections else grace
            turn.delete_pod(pod, "the swarm is being deleted", own)
    # A node that is down confirms no end; the garbage collector deletes its pods, by owner reference, when it can.
    return all(pod.deleting_since is not None and pod.name in inventory.unreachable for pod in pods)


def condition_updates(
    swarm: SwarmView, inventory: PodInventory, ready_counts: ReadyCounts
) -> list[ConditionUpdate]:
    if is_protected(swarm):
        refusal = (
            f"Deletion is forbidden by the annotation {names.PROTECT}=true: the pods stay, but lost ones are not "
            f"replaced. Remove the annotation to continue the deletion (kubectl annotate msw {swarm.name} "
            f"{names.PROTECT}-)."
        )
        ready = ConditionUpdate(READY, ready_counts.coverage > 0, "Protected", refusal)
        return [
            ready,
            ConditionUpdate(PROGRESSING, False, "Protected", refusal),
            ConditionUpdate(DEGRADED, True, "Protected", refusal),
        ]
    left = len(list(inventory.all_pods()))
    waiting = (
        f"The swarm is being deleted; {left} pods are ending." if left else "The swarm is deleted."
    )
    return [
        ConditionUpdate(READY, False, "Deleting", waiting),
        ConditionUpdate(PROGRESSING, bool(left), "Deleting", waiting),
        ConditionUpdate(DEGRADED, False, "Deleting", waiting),
    ]
