"""What is left to do for a swarm that is being deleted: end its pods, then let it go.

Called instead of everything else once the swarm has a deletion time. Creates nothing, ever: under a foreground
deletion the garbage collector would be fought. Services and budgets go by their owner reference.
"""

from __future__ import annotations

from modelswarm_operator.reconcile.manifests.manifests import drain_seconds
from modelswarm_operator.reconcile.pods.inventory import PodInventory, NodeState
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import SwarmView
from modelswarm_operator.reconcile.state.turn import Turn
from modelswarm_operator.reconcile.status.conditions import DEGRADED, PROGRESSING, READY, Verdict
from modelswarm_operator.reconcile.status.status import Tally

ORPHAN = "orphan"  # the garbage collector's finalizer of `--cascade=orphan`


def is_protected(swarm: SwarmView) -> bool:
    return names.is_true(swarm.annotations.get(names.PROTECT))


def end_pods(swarm: SwarmView, fleet: PodInventory, ledger: Turn) -> bool:
    """Whether the finalizer may go."""
    if ORPHAN in swarm.finalizers:
        return True
    if is_protected(swarm):
        return False
    grace = drain_seconds(swarm.spec) if swarm.spec is not None else None
    gone = {one.pod.name for one in fleet.servers if one.node_state is NodeState.DELETED}
    pods = list(fleet.all_pods())
    for pod in pods:
        if pod.name in gone:
            ledger.delete_pod(pod, "its node is gone", 0)
        else:
            ledger.delete_pod(pod, "the swarm is being deleted", grace)
    # A node that is down reports no end; the garbage collector follows the owner reference when it can.
    return all(pod.deleting_since is not None and pod.name in fleet.unreachable for pod in pods)


def verdicts(swarm: SwarmView, fleet: PodInventory, tally: Tally) -> list[Verdict]:
    if is_protected(swarm):
        refusal = (
            f"Deletion is held up by the annotation {names.PROTECT}=true: the pods stay, but lost ones are not "
            f"replaced. Remove the annotation to let the deletion go on (kubectl annotate msw {swarm.name} "
            f"{names.PROTECT}-)."
        )
        ready = Verdict(READY, tally.coverage > 0, "Protected", refusal)
        return [
            ready,
            Verdict(PROGRESSING, False, "Protected", refusal),
            Verdict(DEGRADED, True, "Protected", refusal),
        ]
    left = len(list(fleet.all_pods()))
    waiting = (
        f"The swarm is being deleted; {left} pods are ending." if left else "The swarm is deleted."
    )
    return [
        Verdict(READY, False, "Deleting", waiting),
        Verdict(PROGRESSING, bool(left), "Deleting", waiting),
        Verdict(DEGRADED, False, "Deleting", waiting),
    ]
