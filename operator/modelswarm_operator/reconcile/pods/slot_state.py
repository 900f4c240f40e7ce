"""The state of one slot: its current pod, the candidate, and the pods that are superfluous or failed.

Called by `slot_filler` for every wanted slot. Two pods in one slot are normal for a while (surge, a node that came
back) and possible at any time (a stale view). The rules here resolve every mixture the same way. Decides nothing else.
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
    """The pod that keeps the slot: serves, with the current template, on a READY node; the highest incarnation."""
    candidate: Server | None
    """Without a current pod, the one that is expected to become it: a running pod, else one with a node, else any."""
    outdated: tuple[Server, ...]  # serve, with an older template
    departing: tuple[Server, ...]  # serve on a departing node
    broken: tuple[Server, ...]  # the container was restarted too often
    failed: tuple[Server, ...]  # pods that ended
    redundant: tuple[
        Server, ...
    ]  # neither serving nor needed: an older template, a second candidate
    extra: tuple[Server, ...]  # serve beside the current pod
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
    """`servers`: all of the slot, ordered by incarnation."""
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
    # Pods on a NotReady node stay: the kubelet cannot end them now, and they may return with the node.
    redundant = [
        one
        for one in (*candidates, *(old for old in outdated if _is_useless(old)))
        if one is not candidate and one.node_state is NodeState.READY
    ] + [one for one in working if _is_useless(one) and one.node_state is NodeState.DEPARTING]
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


def _is_useless(server: Server) -> bool:
    return not server.is_serving and not server.may_return


def _progress_of(server: Server) -> tuple[bool, bool, int]:
    """Sort key. A server whose node was away for a moment is ready sooner than one that has yet to load its blocks."""
    pod = server.pod
    return (pod.container.running_since is not None, bool(pod.node), server.incarnation)


def is_broken(server: Server, policy: Policy) -> bool:
    """Return True if the kubelet restarted the container too often in this pod; another node may do better."""
    container = server.pod.container
    return (
        not server.pod.ready
        and container.running_since is None
        and container.restarts >= policy.max_restarts
        and container.ran < policy.long_run
    )


def failure_of(server: Server, policy: Policy) -> str:
    """Return the failure message that counts against the slot; "" if the pod was deleted, drained or lost its node.

    A pod that never served on a node that is departing or down may tolerate the taints of that node. Its successor may
    be placed there too, so it counts: without pauses a pod would be created every second.
    """
    pod, container = server.pod, server.pod.container
    if server.is_terminating:  # the exit code of a terminating container means nothing
        return f"pod {pod.name} was preempted" if pod.disruption == _PREEMPTED else ""
    if server.is_failed:
        why = pod.reason or container.exit_reason or pod.phase
        message = container.exit_message or pod.message
        return f"pod {pod.name} ended ({why})" + (f": {message}" if message else "")
    if is_broken(server, policy):
        message = (
            container.exit_message or container.exit_reason or container.waiting or "no reason"
        )
        return f"pod {pod.name} restarted {container.restarts} times: {message}"
    departing = server.node_state is NodeState.DEPARTING and not pod.ready
    down = server.node_state in (NodeState.UNREACHABLE, NodeState.DELETED)
    if departing or (down and container.running_since is None):
        state = server.node_state.value
        return f"pod {pod.name} was not ready yet on node {pod.node}, which is {state}"
    return ""
