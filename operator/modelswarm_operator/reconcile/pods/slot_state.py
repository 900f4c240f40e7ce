"""The state of one slot: which of its pods wins, which one is on its way, which are in the way.

Called by `keeper` for every slot that is wanted. Two pods of one slot are normal for a while (surge, a node that came
back) and possible at any time (a stale view): the rules here resolve every mixture the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm_operator.reconcile.model.span_plan import Layout
from modelswarm_operator.reconcile.pods.inventory import Ground, Server
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.policy import Policy

_PREEMPTED = "PreemptionByScheduler"


@dataclass(frozen=True, slots=True)
class SlotState:
    key: SlotKey
    settled: Server | None
    """The winner: serves, made by today's recipe, on a node that stays; the highest incarnation of those."""
    hope: Server | None
    """Without a winner, the pod that is expected to become it: what runs, before what has a node, before the rest."""
    outdated: tuple[Server, ...]  # serve, but made by an older recipe
    departing: tuple[Server, ...]  # serve on a node that will go
    broken: tuple[Server, ...]  # container failed too often; replaced
    failed: tuple[Server, ...]  # pods that ended
    idle: tuple[Server, ...]  # not serving and not needed: an older recipe, a second hope
    extra: tuple[Server, ...]  # serve beside a winner
    newest: Server | None

    @property
    def serving(self) -> bool:
        return self.settled is not None or bool(self.outdated or self.departing)

    @property
    def live(self) -> bool:
        return self.serving or self.hope is not None


def state_of(key: SlotKey, servers: Sequence[Server], layout: Layout, policy: Policy) -> SlotState:
    """`servers` are all of the slot, ordered by incarnation."""
    alive = [server for server in servers if server.alive]
    broken = [server for server in alive if is_broken(server, policy)]
    working = [server for server in alive if not is_broken(server, policy)]
    current = [one for one in working if layout.is_current(key.span, one.pool, one.plan)]
    outdated = [server for server in working if server not in current]
    winners = [one for one in current if one.serving and one.ground is Ground.FIRM]
    hopes = [
        one for one in current if not one.serving and one.ground in (Ground.FIRM, Ground.SHAKY)
    ]
    settled = winners[-1] if winners else None
    hope = max(hopes, key=_promise, default=None) if settled is None else None
    # What is on a NotReady node is left alone: nobody could end it, and the node may return with it.
    idle = [
        one
        for one in (*hopes, *(old for old in outdated if not old.serving))
        if one is not hope and one.ground is Ground.FIRM
    ] + [one for one in working if not one.serving and one.ground is Ground.DEPARTING]
    departing = [one for one in current if one.serving and one.ground is Ground.DEPARTING]
    return SlotState(
        key=key,
        settled=settled,
        hope=hope,
        outdated=tuple(one for one in outdated if one.serving),
        departing=tuple(departing),
        broken=tuple(broken),
        failed=tuple(one for one in servers if one.failed and not one.leaving),
        idle=tuple(idle),
        extra=tuple(winners[:-1]),
        newest=servers[-1] if servers else None,
    )


def _promise(server: Server) -> tuple[bool, bool, int]:
    """A server whose node was away for a moment will be ready sooner than one that is still to load its blocks."""
    pod = server.pod
    return (pod.container.running_since is not None, bool(pod.node), server.incarnation)


def is_broken(server: Server, policy: Policy) -> bool:
    """The kubelet restarted the container again and again in this pod; another node may do better."""
    container = server.pod.container
    return (
        not server.pod.ready
        and container.running_since is None
        and container.restarts >= policy.restarts_before_replacing
    )


def failure_of(server: Server, policy: Policy) -> str:
    """Why this pod's end counts against its slot; "" when it was nobody's fault (deleted, drained, node lost)."""
    pod, container = server.pod, server.pod.container
    if server.leaving:  # whatever its containers end with now
        return f"pod {pod.name} was preempted" if pod.disruption == _PREEMPTED else ""
    if server.failed:
        why = pod.reason or container.exit_reason or pod.phase
        words = container.exit_message or pod.message
        return f"pod {pod.name} ended ({why})" + (f": {words}" if words else "")
    if is_broken(server, policy):
        words = container.exit_message or container.exit_reason or container.waiting or "no reason"
        return f"pod {pod.name} restarted {container.restarts} times: {words}"
    return ""
