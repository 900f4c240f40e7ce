"""The pods of a swarm, classified: the slot of each, its role, and the state of its node.

Made once per turn from `Observed`, read by everything that decides about pods. Decides when a node counts as
unreachable; decides nothing about pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from modelswarm.checkpoint.tensor_names import MAX_BLOCKS
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.observed import NodeView, PodView
from modelswarm_operator.reconcile.state.policy import Policy

_MAX_CLOCK_SKEW = 60.0  # seconds between the clocks of operator and API server


class NodeState(Enum):
    """The state of a pod's node, as far as it matters for the pod."""

    READY = "ready"  # Ready, not known, or the pod has no node yet
    UNREADY = "unready"  # NotReady, within its grace period
    DEPARTING = "departing"  # Ready, and will be removed
    UNREACHABLE = "unreachable"  # NotReady for longer than its grace period
    DELETED = "deleted"  # does not exist any more or is out of service: its pods never come back


@dataclass(frozen=True, slots=True)
class Server:
    """One pod of role server."""

    pod: PodView
    slot: SlotKey
    incarnation: int
    node_state: NodeState
    may_return: bool = False  # missed its probes a moment ago, in a container that served

    @property
    def blocks(self) -> str:
        return self.pod.annotations.get(names.BLOCKS, "")

    @property
    def template_hash(self) -> str:
        return self.pod.annotations.get(names.TEMPLATE_HASH, "")

    @property
    def pool(self) -> str:
        return self.pod.annotations.get(names.POOL, "")

    @property
    def model_hash(self) -> str:
        return self.pod.annotations.get(names.MODEL_HASH, "")

    @property
    def model_blocks(self) -> int:
        """Number of blocks of its model; 0 if an earlier operator made the pod, which did not write it."""
        number = names.parse_number(self.pod.annotations.get(names.MODEL_BLOCKS, ""))
        return min(number, MAX_BLOCKS)

    @property
    def is_failed(self) -> bool:
        return self.pod.phase in ("Failed", "Succeeded")

    @property
    def is_terminating(self) -> bool:
        return self.pod.deleting_since is not None

    @property
    def is_alive(self) -> bool:
        """Neither terminating nor failed nor on a deleted node."""
        return (
            not self.is_terminating
            and not self.is_failed
            and self.node_state is not NodeState.DELETED
        )

    @property
    def is_serving(self) -> bool:
        """Capacity: sessions can be sent to it now."""
        return (
            self.is_alive
            and self.pod.ready
            and self.node_state in (NodeState.READY, NodeState.DEPARTING)
        )


@dataclass(frozen=True, slots=True)
class PodInventory:
    servers: tuple[Server, ...]
    inspections: tuple[PodView, ...]
    kept: tuple[PodView, ...]  # annotated `keep`: never changed or deleted
    orphans: tuple[PodView, ...]  # owned by the swarm, without a known slot or role
    mislabelled: tuple[
        tuple[PodView, Mapping[str, str]], ...
    ]  # with the labels that are missing or wrong
    incarnations: frozenset[int]  # seen on any pod in any state
    unreachable: frozenset[str]  # names of pods on nodes that are unreachable or deleted
    mass_outage: tuple[int, int] | None  # (NotReady, all) nodes while nothing is replaced
    next_change_at: float | None  # end of the first grace period of a node

    def all_pods(self) -> Iterable[PodView]:
        yield from (server.pod for server in self.servers)
        yield from self.inspections
        yield from self.kept
        yield from self.orphans


class NodeHealth:
    """States of the nodes now; `next_change_at` is when the first of them changes without an event."""

    def __init__(self, nodes: Mapping[str, NodeView] | None, policy: Policy, now: float) -> None:
        # An empty list cannot be complete, as pods run: treat it as not known.
        self._nodes, self._policy, self._now = nodes or None, policy, now
        self.mass_outage = self._find_mass_outage()
        self.next_change_at: float | None = None

    def _find_mass_outage(self) -> tuple[int, int] | None:
        """Return the nodes that went down within `mass_outage_timeout`, and the nodes that could have; None if too few.

        A node that is down for longer is no part of a short fault of the control plane.
        """
        nodes, policy = self._nodes or {}, self._policy
        recent = self._now - policy.mass_outage_timeout
        up = sum(node.ready for node in nodes.values())
        down = sum(self._down_since(node) > recent for node in nodes.values() if not node.ready)
        many = down >= policy.mass_outage_count and down > policy.mass_outage_fraction * (up + down)
        return (down, up + down) if many else None

    def node_state_of(self, pod: PodView) -> NodeState:
        if self._nodes is None or not pod.node:
            return NodeState.READY
        node = self._nodes.get(pod.node)
        placed = self._time_of(max(pod.created, pod.scheduled or 0.0))
        if node is None:
            # A pod may be placed on a node that is so new that no event of it has come yet.
            known = self._has_passed(placed + self._policy.unknown_node_grace)
            return NodeState.DELETED if known else NodeState.UNREADY
        if node.out_of_service:
            return NodeState.DELETED
        if not node.ready:
            grace = (
                self._policy.mass_outage_timeout
                if self.mass_outage
                else self._policy.not_ready_grace
            )
            # A pod that was scheduled to a NotReady node gets its own grace period. Otherwise its replacement could
            # land there too and be replaced at once, in a loop.
            since = max(self._down_since(node), placed)
            return NodeState.UNREACHABLE if self._has_passed(since + grace) else NodeState.UNREADY
        return NodeState.DEPARTING if node.departing else NodeState.READY

    def may_return(self, pod: PodView) -> bool:
        """Return True if the pod's container has served and is not ready since a moment: it may only be slow.

        A pod that never served is not ready since before its container started.
        """
        since, started = pod.unready_since, pod.container.running_since
        if since is None or started is None or pod.deleting_since is not None:
            return False
        if not started < since <= self._now + _MAX_CLOCK_SKEW:
            return False
        return not self._has_passed(since + self._policy.unready_grace)

    def _down_since(self, node: NodeView) -> float:
        """Return 0 (long ago) if the time is not known."""
        return self._time_of(node.not_ready_since or 0.0)

    def _time_of(self, moment: float) -> float:
        """Return 0 (long ago) for a time that lies in the future, because this clock is slow."""
        return moment if moment <= self._now + _MAX_CLOCK_SKEW else 0.0

    def _has_passed(self, moment: float) -> bool:
        if self._now >= moment:
            return True
        self.next_change_at = (
            moment if self.next_change_at is None else min(self.next_change_at, moment)
        )
        return False


def classify_pods(
    pods: Iterable[PodView], nodes: Mapping[str, NodeView] | None, policy: Policy, now: float
) -> PodInventory:
    """Return all pods classified, sorted by incarnation: the same pods lead to the same decisions."""
    node_health = NodeHealth(nodes, policy, now)
    builder = _InventoryBuilder()
    for pod in sorted(pods, key=lambda pod: pod.name):
        builder.classify(pod, node_health.node_state_of(pod), node_health.may_return(pod))
    builder.servers.sort(key=lambda server: (server.slot, server.incarnation, server.pod.name))
    return PodInventory(
        servers=tuple(builder.servers),
        inspections=tuple(builder.inspections),
        kept=tuple(builder.kept),
        orphans=tuple(builder.orphans),
        mislabelled=tuple(builder.mislabelled),
        incarnations=frozenset(builder.incarnations),
        unreachable=frozenset(builder.unreachable),
        mass_outage=node_health.mass_outage,
        next_change_at=node_health.next_change_at,
    )


@dataclass(slots=True)
class _InventoryBuilder:
    """Collects the parts of a PodInventory."""

    servers: list[Server] = field(default_factory=list)
    inspections: list[PodView] = field(default_factory=list)
    kept: list[PodView] = field(default_factory=list)
    orphans: list[PodView] = field(default_factory=list)
    mislabelled: list[tuple[PodView, Mapping[str, str]]] = field(default_factory=list)
    incarnations: set[int] = field(default_factory=set)
    unreachable: set[str] = field(default_factory=set)

    def classify(self, pod: PodView, node_state: NodeState, may_return: bool) -> None:
        incarnation, slot, role = (
            incarnation_of_pod(pod),
            slot_of_pod(pod),
            pod.labels.get(names.ROLE),
        )
        self.incarnations.add(incarnation)
        if node_state in (NodeState.UNREACHABLE, NodeState.DELETED):
            self.unreachable.add(pod.name)
        if slot is not None and names.is_true(pod.annotations.get(names.KEEP)):
            self.kept.append(pod)
            if role != names.KEPT:
                self.mislabelled.append((pod, {names.ROLE: names.KEPT}))
        elif slot is None and role == names.INSPECT:
            self.inspections.append(pod)
        elif slot is None or role == names.KEPT:
            self.orphans.append(pod)
        else:
            self.servers.append(Server(pod, slot, incarnation, node_state, may_return))
            if wrong := _wrong_labels(pod, slot, incarnation):
                self.mislabelled.append((pod, wrong))


def slot_of_pod(pod: PodView) -> SlotKey | None:
    """Return the slot from the annotation, else from the label. Selectors use labels only, so users edit those."""
    noted, labelled = pod.annotations.get(names.SLOT, ""), pod.labels.get(names.SLOT, "")
    return names.parse_slot(noted) or names.parse_slot(labelled)


def incarnation_of_pod(pod: PodView) -> int:
    """Return the incarnation from the name, which cannot be edited; from the label if the name has another form."""
    return names.incarnation_of_name(pod.name) or names.parse_number(
        pod.labels.get(names.INCARNATION, "")
    )


def _wrong_labels(pod: PodView, slot: SlotKey, incarnation: int) -> dict[str, str]:
    right = {
        names.ROLE: names.SERVER,
        names.SPAN: str(slot.span),
        names.SLOT: str(slot),
        names.INCARNATION: str(incarnation),
    }
    return {key: value for key, value in right.items() if pod.labels.get(key) != value}
