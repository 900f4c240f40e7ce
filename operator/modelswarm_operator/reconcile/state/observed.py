"""The operator's view of a swarm: plain values, no clients.

`informer/parsing` makes them from Kubernetes objects, `informer/cache` puts them together to an `Observed`; the pure
core (`reconcile` and what it calls) reads nothing else. Times are seconds since the epoch (UTC), handed in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from modelswarm.resources.spec import Spec

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class SwarmView:
    """One ModelSwarm as last read. `status` is untyped as stored: an older operator may have written it."""

    uid: str
    name: str
    namespace: str
    generation: int
    resource_version: str
    annotations: Mapping[str, str]
    finalizers: tuple[str, ...]
    is_deleting: bool
    spec: Spec | None  # None: this operator cannot read the stored spec
    spec_problem: str  # why it cannot, as a sentence for the user; "" if it can
    status: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ContainerView:
    """The first container of a pod: the block server (or the inspection)."""

    ready: bool = False
    started: bool = False
    restarts: int = 0
    waiting: str = ""  # reason: CrashLoopBackOff, ImagePullBackOff, ...
    waiting_message: str = ""
    exit_code: int | None = None  # of the current container if it has ended, else of the one before
    exit_reason: str = ""  # OOMKilled, Error, Completed, ...
    exit_message: str = ""  # the termination message, written by the server
    ran: float = 0.0  # seconds that it ran until then; 0: not known
    running_since: float | None = None


@dataclass(frozen=True, slots=True)
class PodView:
    """One pod that has the operator's label and a controller reference to the swarm."""

    name: str
    uid: str
    created: float
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    phase: str  # Pending, Running, Succeeded, Failed, Unknown
    reason: str = ""  # of a failed pod: Evicted, Preempting, NodeLost, ...
    message: str = ""
    node: str = ""
    ip: str = ""
    deleting_since: float | None = None
    deleting_until: float | None = None  # end of its grace period
    ready: bool = False
    unready_since: float | None = None  # time at which it became unready, also at its start
    scheduled: float | None = None  # time of its placement on a node
    unschedulable: str = ""  # the scheduler's message while it finds no node
    disruption: str = ""  # reason of a true DisruptionTarget condition
    container: ContainerView = ContainerView()
    namespace: str = ""


@dataclass(frozen=True, slots=True)
class NodeView:
    name: str
    ready: bool
    not_ready_since: float | None = None
    departing: str = ""  # "cordoned", or the taint that announces its end; "" if it stays
    out_of_service: bool = False  # node.kubernetes.io/out-of-service: its pods may be forced away
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, str] = field(default_factory=dict)


NAME_TAKEN = "exists already and belongs to another owner"
"""End of a rejection: the object's name is taken. Another name will do."""


@dataclass(frozen=True, slots=True)
class Observed:
    """The input of one turn. `pods` is complete: it comes from a LIST plus the events since."""

    swarm: SwarmView
    pods: tuple[PodView, ...]
    nodes: (
        Mapping[str, NodeView] | None
    )  # None: no permission to read nodes; what needs them is left out
    children: Mapping[tuple[str, str], Json] = field(default_factory=dict)
    """The swarm's Services and PodDisruptionBudgets as stored, by (kind, name)."""
    taken_name: str = ""  # served name of the swarm, or of an adapter, that another swarm has
    name_taken_by: str = ""  # "namespace/name" of that swarm
    rejected: Mapping[str, str] = field(default_factory=dict)
    """The API server's reason for its last rejection (quota, policy, ...), by slot ("0-1") or by owned object
    ("Service/name"). A reason that ends with NAME_TAKEN comes from the executor."""
    start_progress: Mapping[str, str] = field(default_factory=dict)
    """Phase of a server's start, in the server's own words, by the pod's uid; only of servers that answered."""
