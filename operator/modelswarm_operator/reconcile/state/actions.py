"""The actions that a turn may decide on, and its Decision: plain values, no clients.

Returned by `reconcile`, carried out in this order by `controller/executor`. Nothing here says how an action is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelswarm_operator.reconcile.state.observed import Json


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace the status, with the resourceVersion of the swarm that was observed. Always the first action.

    If it fails, no later action happens: incarnations and plans are stored before they are acted on.
    """

    status: Json


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    present: bool


@dataclass(frozen=True, slots=True)
class CreatePod:
    """POST. AlreadyExists is success if the pod there is this one."""

    slot: str  # "0-1": span 0, ordinal 1; "inspect" for the inspection
    manifest: Json


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete with the uid as precondition, so that a later pod of the same name is safe."""

    name: str
    uid: str
    reason: str  # for the log
    grace_seconds: int | None = None  # None: the pod's own


@dataclass(frozen=True, slots=True)
class LabelPod:
    """Merge-patch labels of the pod with this uid: restores edited ones, takes a kept pod out of service."""

    name: str
    uid: str
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ApplyChild:
    """Server-side apply of a Service or PodDisruptionBudget."""

    manifest: Json


@dataclass(frozen=True, slots=True)
class DeleteChild:
    kind: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Write a Kubernetes Event on the swarm: for transitions only, never per turn."""

    kind: str  # Normal or Warning
    reason: str
    message: str


Action = (
    WriteStatus
    | SetFinalizer
    | CreatePod
    | DeletePod
    | LabelPod
    | ApplyChild
    | DeleteChild
    | RecordEvent
)


@dataclass(frozen=True, slots=True)
class Decision:
    actions: Sequence[Action]
    requeue_at: (
        float | None
    )  # time of the next turn if no event comes before; None: on events and resync only
