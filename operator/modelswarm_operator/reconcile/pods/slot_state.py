"""The state of one slot: which of its pods wins, which one is on its way, which are in the way.

Called by `keeper` for every slot that is wanted. Two pods of one slot are normal for a while (surge, a node that came
back) and possible at any time (a stale view): the rules here resolve every mixture the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import NodeState, Server
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.policy import Policy

_PREEMPTED = "PreemptionByScheduler"


@dataclass(frozen=True, slots=True)
class SlotState:
    key: SlotKey
    current: Server | None
    """The winner: serves, made by today's recipe, on a node that stays; the highest incarnation of those."""
    candidate: Server | None
    """Without a winner, the pod that is expected to become it: what runs, before what has a node, before the rest."""
    outdated: tuple[Server, ...]  # serve, but made by an older recipe
    departing: tuple[Server, ...]  # serve on a node that will go
    broken: tuple[Server, ...]  # container failed too often; replaced
    failed: tuple[Server, ...]  # pods that ended
    redundant: tuple[Server, ...]  # not serving and not needed: an older recipe, a second hope
    extra: tuple[Server, ...]  # serve beside a winner
    newest: Server | None

    @property
    def is_serving(self) -> bool:
        return self.current is not None or bool(self.outdated or self.departing)

    @property
    def is_live(self) -> bool:
        return self.is_serving or self.candidate is not None


def classify_slot(
    key: SlotKey, servers: Sequence[Server], layout: Layout, policy: Policy
) -> SlotState:
    """`servers` are all of the slot, ordered by incarnation."""
    alive = [server for server in servers if server.is_alive]
    broken = [server for server in alive if is_broken(server, policy)]
    working = [server for server in alive if not is_broken(server, policy)]
    up_to_date = [
        one for one in working if layout.is_current(key.span, one.pool, one.template_hash)
    ]
    outdated = [server for server in working if server not in up_to_date]
    winners = [one for one in up_to_date if one.is_serving and one.node_state is NodeState.READY]
    candidates = [
        one
        for one in up_to_date
        if not one.is_serving and one.node_state in (NodeState.READY, NodeState.UNREADY)
    ]
    current = winners[-1] if winners else None
    candidate = max(candidates, key=_progress_of, default=None) if current is None else None
    # What is on a NotReady node is left alone: nobody could end it, and the node may return with it.
    redundant = [
        one
        for one in (*candidates, *(old for old in outdated if not old.is_serving))
        if one is not candidate and one.node_state is NodeState.READY
    ] + [one for one in working if not one.is_serving and one.node_state is NodeState.DEPARTING]
    departing = [
        one for one in up_to_date if one.is_serving and one.node_state is NodeState.DEPARTING
    ]
    return SlotState(
        key=key,
        current=current,
        candidate=candidate,
        outdated=tuple(one for one in outdated if one.is_serving),
        departing=tuple(departing),
        broken=tuple(broken),
        failed=tuple(one for one in servers if one.is_failed and not one.is_terminating),
        redundant=tuple(redundant),
        extra=tuple(winners[:-1]),
        newest=servers[-1] if servers else None,
    )


def _progress_of(server: Server) -> tuple[bool, bool, int]:
    """A server whose node was away for a moment will be ready sooner than one that is still to load its blocks."""
    pod = server.pod
    return (pod.container.running_since is not None, bool(pod.node), server.incarnation)


def is_broken(server: Server, policy: Policy) -> bool:
    """The kubelet restarted the container again and again in this pod; another node may do better."""
    container = server.pod.container
    return (
        not server.pod.ready
        and container.running_since is None
        and container.restarts >= policy.max_restarts
    )


def failure_of(server: Server, policy: Policy) -> str:
    """Why this pod's end counts against its slot; "" when it was nobody's fault (deleted, drained, node lost)."""
    pod, container = server.pod, server.pod.container
    if server.is_terminating:  # whatever its containers end with now
        return f"pod {pod.name} was preempted" if pod.disruption == _PREEMPTED else ""
    if server.is_failed:
        why = pod.reason or container.exit_reason or pod.phase
        words = container.exit_message or pod.message
        return f"pod {pod.name} ended ({why})" + (f": {words}" if words else "")
    if is_broken(server, policy):
        words = container.exit_message or container.exit_reason or container.waiting or "no reason"
        return f"pod {pod.name} restarted {container.restarts} times: {words}"
    return ""
