"""The operator's own Prometheus metrics. Names are documented in docs/metrics.md; labels are bounded.

Updated by the edge, served by `probe_server`. Knows no client; state is handed in as numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)

from modelswarm import __version__
from modelswarm_operator.kube.resources import (
    BUDGET,
    EVENT,
    LEASE,
    NODE,
    POD,
    REVIEW,
    SERVICE,
    SWARM,
)
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import PodView

_RESOURCES = {kind.plural for kind in (SWARM, POD, NODE, SERVICE, BUDGET, EVENT, LEASE, REVIEW)}
_TURN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
POD_STATES = ("pending", "unschedulable", "starting", "ready", "terminating", "failed")
CONDITIONS = ("Ready", "Progressing", "Degraded")
STATUSES = ("True", "False", "Unknown")
WATCH_EVENTS = ("LISTED", "ADDED", "MODIFIED", "DELETED")
NO_RESPONSE = "none"
API_FAILURES = (NO_RESPONSE, "403", "404", "409", "422", "429", "500", "503")
RESULTS = ("changed", "quiet", "conflict", "throttled", "failed", "fault")  # of a turn


class Metrics:
    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.turn_seconds = Histogram(
            "modelswarm_operator_reconcile_seconds",
            "Duration of one reconcile of one swarm, by result.",
            ["result"],
            buckets=_TURN_SECONDS,
            registry=self.registry,
        )
        self.queue_seconds = Histogram(
            "modelswarm_operator_queue_seconds",
            "Time from an event to the reconcile of its swarm.",
            buckets=_TURN_SECONDS,
            registry=self.registry,
        )
        self.api_calls = self._counter(
            "api_requests", "Requests to the API server.", ["verb", "resource", "code"]
        )
        self.api_seconds = Histogram(
            "modelswarm_operator_api_request_seconds",
            "Duration of requests to the API server, without watches.",
            ["verb"],
            buckets=_TURN_SECONDS,
            registry=self.registry,
        )
        self.watch_events = self._counter(
            "watch_events", "Watch events received.", ["resource", "type"]
        )
        self.watch_restarts = self._counter("watch_restarts", "Watches that were restarted.")
        self.resyncs = self._counter("resyncs", "Full lists by result.", ["result"])
        self.created = self._counter("pods_created", "Pods created.", ["role"])
        self.deleted = self._counter("pods_deleted", "Pods deleted.", ["role"])
        self.rejected = self._counter(
            "rejected_writes", "Writes that the API server rejected permanently.", ["resource"]
        )
        self.leader = self._gauge("leader", "1 while this process leads.")
        self.missing_permissions = self._gauge(
            "missing_permissions",
            "Required permissions that the operator lacks and waits for at its start.",
        )
        self.last_resync = self._gauge(
            "last_resync_timestamp_seconds", "Time at which the last full list was complete."
        )
        self.swarms = self._gauge(
            "swarms", "Swarms by condition and its status.", ["condition", "status"]
        )
        self.pods = self._gauge("pods", "Server pods by state.", ["state"])
        version = self._gauge("build_info", "Version of the running operator.", ["version"])
        version.labels(__version__).set(1)
        self._start_at_zero()

    def _start_at_zero(self) -> None:
        """Create all label values: a counter that appears with its first event shows no increase."""
        for kind in (POD, SERVICE, BUDGET):
            self.rejected.labels(kind.plural)
        for kind, happened in product((SWARM, POD, SERVICE, BUDGET, NODE), WATCH_EVENTS):
            self.watch_events.labels(kind.plural, happened)
        for result in RESULTS:
            self.turn_seconds.labels(result)
        for ended in ("done", "failed"):
            self.resyncs.labels(ended)
        for role in ("server", "inspect"):
            self.created.labels(role)
            self.deleted.labels(role)
        self.deleted.labels("other")  # pods that are kept for their users
        self.count_pods(())
        self.count_swarms(())

    def _counter(self, name: str, text: str, labels: Iterable[str] = ()) -> Counter:
        return Counter(f"modelswarm_operator_{name}", text, list(labels), registry=self.registry)

    def _gauge(self, name: str, text: str, labels: Iterable[str] = ()) -> Gauge:
        return Gauge(f"modelswarm_operator_{name}", text, list(labels), registry=self.registry)

    def record_api_call(self, verb: str, path: str, code: int, seconds: float) -> None:
        parts = path.split("/")
        resource = next((part for part in reversed(parts) if part in _RESOURCES), "other")
        for failure in API_FAILURES:  # at zero from the first request of this kind on
            self.api_calls.labels(verb, resource, failure)
        self.api_calls.labels(verb, resource, str(code) if code else NO_RESPONSE).inc()
        self.api_seconds.labels(verb).observe(seconds)

    def count_pods(self, pods: Iterable[PodView]) -> None:
        totals = dict.fromkeys(POD_STATES, 0)
        for pod in pods:
            if pod.labels.get(names.ROLE) == names.SERVER:  # others inspect a model, or are kept
                totals[pod_state(pod)] += 1
        for state, total in totals.items():
            self.pods.labels(state).set(total)

    def count_swarms(self, statuses: Iterable[dict[str, object]]) -> None:
        totals = {(name, status): 0 for name in CONDITIONS for status in STATUSES}
        for status in statuses:
            conditions = status.get("conditions")
            for item in conditions if isinstance(conditions, list) else ():
                key = (item.get("type"), item.get("status"))
                if key in totals:
                    totals[key] += 1
        for (name, value), total in totals.items():
            self.swarms.labels(name, value).set(total)


def pod_state(pod: PodView) -> str:
    if pod.deleting_since is not None:
        return "terminating"
    if pod.phase in ("Failed", "Succeeded"):
        return "failed"
    if pod.ready:
        return "ready"
    if pod.unschedulable:
        return "unschedulable"
    return "starting" if pod.phase == "Running" else "pending"
