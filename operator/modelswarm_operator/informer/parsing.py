"""Turns Kubernetes objects (plain dicts) into the small views of `reconcile/state/observed`.

Called by `cache` for every object that changed. Absent fields are normal: a new pod has no conditions, an older API
server leaves fields out. Knows no client and keeps nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from modelswarm.resources.spec import Spec
from modelswarm.resources.status import parse_timestamp
from modelswarm.resources.violations import list_violations
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import (
    ContainerView,
    Json,
    NodeView,
    PodView,
    SwarmView,
)

DEPARTURE_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "remediator.kubernetes.azure.com/unschedulable",
        "node.cloudprovider.kubernetes.io/shutdown",
        f"{names.DOMAIN}/maintenance",
    }
)
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{20,}")
"""A hub token that a failing server may print. Status, Events and logs are read by more people than Secrets."""
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def parse_time(timestamp: str | None) -> float | None:
    """Return seconds since the epoch for a time like `2026-11-21T10:00:00Z`; None for None."""
    return parse_timestamp(timestamp) if timestamp else None


def swarm_view(raw: Json) -> SwarmView:
    meta = raw["metadata"]
    spec, problem = _spec_of(raw.get("spec"))
    return SwarmView(
        uid=meta["uid"],
        name=meta["name"],
        namespace=meta["namespace"],
        generation=meta.get("generation", 0),
        resource_version=meta["resourceVersion"],
        annotations=_own_annotations(meta),
        finalizers=tuple(meta.get("finalizers") or ()),
        is_deleting=meta.get("deletionTimestamp") is not None,
        spec=spec,
        spec_problem=problem,
        status=raw.get("status") or {},
    )


def _own_annotations(meta: Json) -> dict[str, str]:
    """Return the annotations of our domain but the chat template: a cache of 1,000 pods must stay small."""
    return {
        key: text
        for key, text in (meta.get("annotations") or {}).items()
        if key.startswith(f"{names.DOMAIN}/") and key != names.CHAT_TEMPLATE
    }


def _spec_of(raw: Any) -> tuple[Spec | None, str]:
    """Return the spec, or None and the reason. Unknown fields are ignored: a newer CRD may have them."""
    try:
        return Spec.model_validate(raw), ""
    except ValidationError as error:
        return None, "spec." + list_violations(error, Spec)[0]


def pod_view(raw: Json) -> PodView:
    meta, status = raw["metadata"], raw.get("status") or {}
    conditions = _by_type(status.get("conditions"))
    scheduled, disruption, ready = (
        conditions.get("PodScheduled", {}),
        conditions.get("DisruptionTarget", {}),
        conditions.get("Ready", {}),
    )
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        created=parse_time(meta.get("creationTimestamp")) or 0.0,
        scheduled=_scheduled_at(scheduled),
        labels=meta.get("labels") or {},
        annotations=_own_annotations(meta),
        phase=status.get("phase") or "Pending",
        reason=status.get("reason") or "",
        message=status.get("message") or "",
        node=(raw.get("spec") or {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        deleting_since=_deleting_since(meta),
        deleting_until=parse_time(meta.get("deletionTimestamp")),
        ready=ready.get("status") == "True",
        unready_since=None
        if ready.get("status") == "True"
        else parse_time(ready.get("lastTransitionTime")),
        unschedulable=_scheduler_message(scheduled) if scheduled.get("status") == "False" else "",
        disruption=disruption.get("reason", "") if disruption.get("status") == "True" else "",
        container=_container_view(status.get("containerStatuses")),
        namespace=meta.get("namespace") or "",
    )


def _deleting_since(meta: Mapping[str, Any]) -> float | None:
    """Return the start of the grace period: the API server stores its end."""
    ends = parse_time(meta.get("deletionTimestamp"))
    return None if ends is None else ends - float(meta.get("deletionGracePeriodSeconds") or 0)


def _container_view(statuses: Any) -> ContainerView:
    """Return the view of our own container: the kubelet sorts by name, so a proxy of a mesh may come first."""
    if not statuses:
        return ContainerView()
    ours = (one for one in statuses if one.get("name") == names.CONTAINER)
    first: Mapping[str, Any] = next(ours, statuses[0])
    state = first.get("state") or {}
    waiting, running = state.get("waiting") or {}, state.get("running") or {}
    ended = state.get("terminated") or (first.get("lastState") or {}).get("terminated") or {}
    return ContainerView(
        ready=bool(first.get("ready")),
        started=bool(first.get("started")),
        restarts=first.get("restartCount") or 0,
        waiting=waiting.get("reason") or "",
        waiting_message=waiting.get("message") or "",
        exit_code=ended.get("exitCode"),
        exit_reason=ended.get("reason") or "",
        exit_message=_TOKEN.sub("hf_***", ended.get("message") or ""),
        ran=_seconds_ran(ended),
        running_since=parse_time(running.get("startedAt")),
    )


def _seconds_ran(ended: Mapping[str, Any]) -> float:
    began, end = parse_time(ended.get("startedAt")), parse_time(ended.get("finishedAt"))
    return 0.0 if began is None or end is None else end - began


def node_view(raw: Json) -> NodeView:
    meta, spec, status = raw["metadata"], raw.get("spec") or {}, raw.get("status") or {}
    ready = _by_type(status.get("conditions")).get("Ready", {})
    is_ready = ready.get("status") == "True"
    taints = [taint.get("key", "") for taint in spec.get("taints") or ()]
    return NodeView(
        name=meta["name"],
        ready=is_ready,
        not_ready_since=None if is_ready else parse_time(ready.get("lastTransitionTime")),
        departing=_departure_reason(bool(spec.get("unschedulable")), taints),
        out_of_service=OUT_OF_SERVICE in taints,
        labels=meta.get("labels") or {},
        allocatable=status.get("allocatable") or {},
    )


def _departure_reason(cordoned: bool, taints: Iterable[str]) -> str:
    notice = next((key for key in taints if key in DEPARTURE_TAINTS), "")
    return notice or ("cordoned" if cordoned else "")


def _by_type(conditions: Any) -> dict[str, Mapping[str, Any]]:
    return {item.get("type", ""): item for item in conditions or ()}


def _scheduled_at(condition: Mapping[str, Any]) -> float | None:
    found = condition.get("status") == "True"
    return parse_time(condition.get("lastTransitionTime")) if found else None


def _scheduler_message(condition: Mapping[str, Any]) -> str:
    return condition.get("message") or condition.get("reason") or "not scheduled yet"
