"""What the operator sees and what it may do: plain values, no clients.

The edge (`observe`, `apply`) turns Kubernetes objects into these and carries the actions out; the pure core
(`reconcile` and what it calls) takes and returns nothing else. Times are seconds since the epoch (UTC), handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelswarm.resources.spec import Spec

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SwarmView:
    """One ModelSwarm as last read; `status` is what is stored, untyped: an older operator may have written it."""

    uid: str
    name: str
    namespace: str
    generation: int
    resource_version: str
    annotations: Mapping[str, str]
    finalizers: tuple[str, ...]
    is_deleting: bool
    spec: Spec | None  # None: the stored spec is not one this operator understands ...
    spec_problem: str  # ... and why, in a sentence a person can act on
    status: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerView:
    """The first container of a pod: the block server (or the inspection)."""

    ready: bool = False
    started: bool = False
    restarts: int = 0
    waiting: str = ""  # reason: CrashLoopBackOff, ImagePullBackOff, ...
    waiting_message: str = ""
    exit_code: int | None = None  # of the current (terminated) or else of the last life
    exit_reason: str = ""  # OOMKilled, Error, Completed, ...
    exit_message: str = ""  # the termination message: the server's own last words
    running_since: float | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod that carries our label and our controller reference."""

    name: str
    uid: str
    created: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    reason: str = ""  # of a failed pod: Evicted, Preempting, NodeLost, ...
    message: str = ""
    node: str = ""
    deleting_since: float | None = None
    ready: bool = False
    scheduled: float | None = None  # when it was given its node
    unschedulable: str = ""  # the scheduler's message while it finds no node
    disruption: str = ""  # reason of a true DisruptionTarget condition
    container: ContainerView = ContainerView()


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    ready: bool
    not_ready_since: float | None = None
    departing: str = ""  # why it will go: "cordoned", or the taint that says so; "" if it stays
    out_of_service: bool = False  # node.kubernetes.io/out-of-service: its pods may be forced away
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


NAME_TAKEN = "that is not this swarm's is there"


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything one turn looks at. `pods` is complete: it comes from a LIST plus the events since."""

    swarm: SwarmView
    pods: tuple[PodView, ...]
    nodes: (
        Mapping[str, NodeView] | None
    )  # None: no right to read nodes; what needs them is left out
    children: Mapping[tuple[str, str], Json] = field(default_factory=dict)
    """Our Services and PodDisruptionBudgets as stored, by (kind, name)."""
    served_name_taken_by: str = ""  # "namespace/name" of the swarm that has the same name already
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Why the API server refused the last create of a slot's pod ("0-1": quota, policy, ...), by slot. What ends with
    TAKEN is no wish of the API server's: another name will do."""
