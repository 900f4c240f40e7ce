"""The pods of a swarm as the keeper sees them: whose slot each fills, and what can be expected of it.

Made once per turn from what was observed. Decides which nodes count as lost; decides nothing about pods.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.names import SlotKey
from modelswarm_operator.reconcile.state.observed import NodeView, PodView
from modelswarm_operator.reconcile.state.policy import Policy

_SKEW = 60.0  # seconds that clocks may differ


class Ground(Enum):
    """What the node under a pod is good for."""

    FIRM = "firm"  # Ready, not known, or the pod has no node yet
    SHAKY = "shaky"  # NotReady, but not to be given up yet
    DEPARTING = "departing"  # serves now, will go
    LOST = "lost"  # NotReady for too long
    GONE = "gone"  # does not exist any more, or is out of service: its pods never come back


@dataclass(frozen=True, slots=True)
class Server:
    """One pod of role server."""

    pod: PodView
    slot: SlotKey
    incarnation: int
    ground: Ground

    @property
    def blocks(self) -> str:
        return self.pod.annotations.get(names.BLOCKS, "")

    @property
    def plan(self) -> str:
        return self.pod.annotations.get(names.PLAN, "")

    @property
    def pool(self) -> str:
        return self.pod.annotations.get(names.POOL, "")

    @property
    def generation(self) -> str:
        return self.pod.annotations.get(names.GENERATION, "")

    @property
    def failed(self) -> bool:
        return self.pod.phase in ("Failed", "Succeeded")

    @property
    def leaving(self) -> bool:
        return self.pod.deleting_since is not None

    @property
    def alive(self) -> bool:
        """Neither leaving nor failed nor on a node that will not come back."""
        return not self.leaving and not self.failed and self.ground is not Ground.GONE

    @property
    def serving(self) -> bool:
        """Capacity: what sessions can be sent to now."""
        return self.alive and self.pod.ready and self.ground in (Ground.FIRM, Ground.DEPARTING)


@dataclass(frozen=True, slots=True)
class Fleet:
    servers: tuple[Server, ...]
    inspections: tuple[PodView, ...]
    kept: tuple[PodView, ...]  # to be left alone
    strays: tuple[PodView, ...]  # ours, but of no slot or role that is known
    mislabelled: tuple[tuple[PodView, Mapping[str, str]], ...]  # and the labels they should have
    incarnations: frozenset[int]  # seen on any pod, whatever became of it
    out_of_reach: frozenset[str]  # pods on nodes that are lost or gone
    mass: tuple[int, int] | None  # (NotReady, all) nodes while replacing is paused
    wake_at: float | None  # when some node's grace ends

    def pods(self) -> Iterable[PodView]:
        yield from (server.pod for server in self.servers)
        yield from self.inspections
        yield from self.kept
        yield from self.strays


class Grounds:
    """Judges nodes; remembers when the next judgement changes by itself."""

    def __init__(self, nodes: Mapping[str, NodeView] | None, policy: Policy, now: float) -> None:
        # No node at all: pods run, so that can't be the truth yet.
        self._nodes, self._policy, self._now = nodes or None, policy, now
        self.mass = self._mass()
        self.wake_at: float | None = None

    def _mass(self) -> tuple[int, int] | None:
        """Nodes that went down lately, of those that could have. What is down for long is no part of a blip."""
        nodes, policy = self._nodes or {}, self._policy
        lately = self._now - policy.mass_patience
        up = sum(node.ready for node in nodes.values())
        down = sum(self._down_since(node) > lately for node in nodes.values() if not node.ready)
        many = down >= policy.mass_count and down > policy.mass_fraction * (up + down)
        return (down, up + down) if many else None

    def under(self, pod: PodView) -> Ground:
        if self._nodes is None or not pod.node:
            return Ground.FIRM
        node = self._nodes.get(pod.node)
        placed = max(pod.created, pod.scheduled or 0.0)
        if node is None:
            # A pod may have waited long for a node that is so new that nobody has told of it yet.
            known = self._passed(placed + self._policy.unknown_node_grace)
            return Ground.GONE if known else Ground.SHAKY
        if node.out_of_service:
            return Ground.GONE
        if not node.ready:
            patience = self._policy.mass_patience if self.mass else self._policy.not_ready_grace
            # Who was placed there meanwhile has its own patience: or its successor is placed there, and the next one.
            since = max(self._down_since(node), placed)
            return Ground.LOST if self._passed(since + patience) else Ground.SHAKY
        return Ground.DEPARTING if node.departing else Ground.FIRM

    def _down_since(self, node: NodeView) -> float:
        """Long ago, if nobody knows; so too if that is yet to come, because this clock is slow."""
        since = node.not_ready_since or 0.0
        return since if since <= self._now + _SKEW else 0.0

    def _passed(self, moment: float) -> bool:
        if self._now >= moment:
            return True
        self.wake_at = moment if self.wake_at is None else min(self.wake_at, moment)
        return False


def muster(
    pods: Iterable[PodView], nodes: Mapping[str, NodeView] | None, policy: Policy, now: float
) -> Fleet:
    """Sorted by incarnation, so that every decision that follows is the same for the same pods."""
    grounds = Grounds(nodes, policy, now)
    call = _Call()
    for pod in sorted(pods, key=lambda pod: pod.name):
        call.enter(pod, grounds.under(pod))
    call.servers.sort(key=lambda server: (server.slot, server.incarnation, server.pod.name))
    return Fleet(
        servers=tuple(call.servers),
        inspections=tuple(call.inspections),
        kept=tuple(call.kept),
        strays=tuple(call.strays),
        mislabelled=tuple(call.mislabelled),
        incarnations=frozenset(call.incarnations),
        out_of_reach=frozenset(call.out_of_reach),
        mass=grounds.mass,
        wake_at=grounds.wake_at,
    )


@dataclass(slots=True)
class _Call:
    """A fleet in the making."""

    servers: list[Server] = field(default_factory=list)
    inspections: list[PodView] = field(default_factory=list)
    kept: list[PodView] = field(default_factory=list)
    strays: list[PodView] = field(default_factory=list)
    mislabelled: list[tuple[PodView, Mapping[str, str]]] = field(default_factory=list)
    incarnations: set[int] = field(default_factory=set)
    out_of_reach: set[str] = field(default_factory=set)

    def enter(self, pod: PodView, ground: Ground) -> None:
        incarnation, slot, role = incarnation_of(pod), slot_of(pod), pod.labels.get(names.ROLE)
        self.incarnations.add(incarnation)
        if ground in (Ground.LOST, Ground.GONE):
            self.out_of_reach.add(pod.name)
        if slot is not None and names.is_true(pod.annotations.get(names.KEEP)):
            self.kept.append(pod)
            if role != names.KEPT:
                self.mislabelled.append((pod, {names.ROLE: names.KEPT}))
        elif role == names.INSPECT:
            self.inspections.append(pod)
        elif slot is None or role == names.KEPT:
            self.strays.append(pod)
        else:
            self.servers.append(Server(pod, slot, incarnation, ground))
            if wrong := _wrong_labels(pod, slot, incarnation):
                self.mislabelled.append((pod, wrong))


def slot_of(pod: PodView) -> SlotKey | None:
    """From the annotation, which selectors do not use and so nobody edits; else from the label."""
    noted, labelled = pod.annotations.get(names.SLOT, ""), pod.labels.get(names.SLOT, "")
    return names.parse_slot(noted) or names.parse_slot(labelled)


def incarnation_of(pod: PodView) -> int:
    """The name can't be edited; the label stands in for names that are not of our making."""
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
