"""The actions that a turn may decide on, and its Decision: plain values, no clients.

Returned by `reconcile`, carried out by `controller/executor.py` in the order of the Decision. They know neither the API
server nor the order in which it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelswarm_operator.reconcile.state.observed import Json


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """Replace status, with the resourceVersion of the swarm that was observed. Always the first action:
    if it fails, nothing after it happens (incarnations and plans are stored before they are acted on)."""

    status: Json


@dataclass(frozen=True, slots=True)
class SetFinalizer:
    present: bool


@dataclass(frozen=True, slots=True)
class CreatePod:
    """POST; AlreadyExists of our own making is success."""

    slot: str  # "0-1": span 0, ordinal 1; "inspect" for the inspection
    manifest: Json


@dataclass(frozen=True, slots=True)
class DeletePod:
    """With the uid as precondition: never somebody else of the same name."""

    name: str
    uid: str
    reason: str  # for the log
    grace_seconds: int | None = None  # None: the pod's own


@dataclass(frozen=True, slots=True)
class LabelPod:
    """Merge-patch these labels of a pod of this uid: a hand-edited one is put right, a kept one goes out of service."""

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
    """A Kubernetes Event on the swarm: transitions only, never per turn."""

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
    )  # look again then, even if nothing happens; None: only on events and resync
