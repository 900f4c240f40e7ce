"""Small parts outside the pure core: errors, views of objects, limits on Events, expiry of a Lease."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from prometheus_client import CollectorRegistry
from support.ports import loopback_hosts

from modelswarm.kube.errors import (
    ConflictError,
    KubeUnavailableError,
    NotFoundError,
    RejectedError,
    ThrottledError,
    UnauthorizedError,
    error_of,
)
from modelswarm.process.command_line import join_target
from modelswarm_operator.controller.executor import _steps
from modelswarm_operator.informer.parsing import node_view, parse_time, pod_view
from modelswarm_operator.kube.events import BURST, REFILL_SECONDS, REPEAT_SECONDS, EventLimiter
from modelswarm_operator.kube.leader_election import Lease, LeaseExpiry, LeaseLostError
from modelswarm_operator.kube.resources import BUDGET, NODE, POD, SWARM
from modelswarm_operator.observability.probe_server import ProbeServer
from modelswarm_operator.reconcile.state.actions import (
    CreatePod,
    DeletePod,
    RecordEvent,
    WriteStatus,
)

Json = dict[str, Any]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_lease(version: int, holder: str | None = "other", duration: int = 8) -> Json:
    spec = {"holderIdentity": holder, "leaseDurationSeconds": duration}
    return {"metadata": {"resourceVersion": str(version)}, "spec": spec}


def test_changing_lease_never_expires() -> None:
    clock = Clock()
    expiry = LeaseExpiry(clock)
    for version in range(100):
        assert not expiry.has_expired(make_lease(version), "me")
        clock.now += 7.9


def test_unchanged_lease_expires_after_its_duration() -> None:
    clock = Clock()
    expiry = LeaseExpiry(clock)
    assert not expiry.has_expired(make_lease(1), "me")
    clock.now += 7.9
    assert not expiry.has_expired(make_lease(1), "me")
    clock.now += 0.1
    assert expiry.has_expired(make_lease(1), "me")


def test_lease_duration_of_the_holder_counts() -> None:
    clock = Clock()
    expiry = LeaseExpiry(clock)
    expiry.has_expired(make_lease(1, duration=30), "me")
    clock.now += 29
    assert not expiry.has_expired(make_lease(1, duration=30), "me")
    clock.now += 1
    assert expiry.has_expired(make_lease(1, duration=30), "me")


@pytest.mark.parametrize("holder", ["", None, "me"])
def test_released_or_own_lease_expires_at_once(holder: str | None) -> None:
    assert LeaseExpiry(Clock()).has_expired(make_lease(1, holder), "me")


class FreeLeaseApi:
    """An API server without a Lease, with requests of one second."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def get(self, path: str) -> Json:
        raise NotFoundError(404, "NotFound", "no lease")

    async def send(self, verb: str, path: str, body: Json, seconds: float) -> Json:
        self._clock.now += 1.0
        return {**body, "metadata": {**body["metadata"], "resourceVersion": "1"}}


async def test_writes_may_take_as_long_as_the_lease_is_held() -> None:
    clock = Clock()
    api: Any = FreeLeaseApi(clock)
    lease = Lease(api, "ns", "operator", "me", clock=clock)
    await lease.acquire()
    assert lease.seconds_to_write() == 5.0, "six seconds from when the request was sent"
    clock.now += 4.5
    assert lease.seconds_to_write() == 0.5
    clock.now += 0.5
    with pytest.raises(LeaseLostError):
        lease.seconds_to_write()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, RejectedError),
        (401, UnauthorizedError),
        (403, RejectedError),
        (404, NotFoundError),
        (409, ConflictError),
        (410, KubeUnavailableError),
        (422, RejectedError),
        (429, ThrottledError),
        (500, KubeUnavailableError),
        (504, KubeUnavailableError),
    ],
)
def test_status_code_maps_to_its_error(code: int, kind: type[Exception]) -> None:
    error = error_of(code, {"reason": "Because", "message": "a message"}, None)
    assert type(error) is kind
    assert str(error) == "a message"


def test_webhook_that_does_not_answer_is_a_rejection() -> None:
    """The turn would fail as a whole and be repeated for ever, and no condition would tell."""
    message = 'Internal error occurred: failed calling webhook "pods.example.io": no endpoints'
    error = error_of(500, {"reason": "InternalError", "message": message}, None)
    assert type(error) is RejectedError and "pods.example.io" in str(error)


def test_already_exists_differs_from_a_conflict() -> None:
    taken = error_of(409, {"reason": "AlreadyExists"}, None)
    assert isinstance(taken, ConflictError)
    assert taken.already_exists
    late = error_of(409, {"reason": "Conflict"}, None)
    assert isinstance(late, ConflictError)
    assert not late.already_exists


@pytest.mark.parametrize(
    ("header", "body", "seconds"),
    [("7", {}, 7.0), (None, {"details": {"retryAfterSeconds": 3}}, 3.0), (None, "text", 1.0)],
)
def test_retry_delay_is_read_from_header_or_body(
    header: str | None, body: Any, seconds: float
) -> None:
    error = error_of(429, body, header)
    assert isinstance(error, ThrottledError)
    assert error.retry_after == seconds


def test_repeated_event_is_recorded_once_in_ten_minutes() -> None:
    clock = Clock()
    limit = EventLimiter(clock)
    assert limit.try_acquire("uid", "Reason", "sentence")
    assert not limit.try_acquire("uid", "Reason", "sentence")
    assert limit.try_acquire("uid", "Reason", "another")
    assert limit.try_acquire("other", "Reason", "sentence")
    clock.now += REPEAT_SECONDS
    assert limit.try_acquire("uid", "Reason", "sentence")


def test_event_limit_applies_to_each_swarm_alone() -> None:
    clock = Clock()
    limit = EventLimiter(clock)
    acquired = [limit.try_acquire("loud", "Reason", str(number)) for number in range(100)]
    assert sum(acquired) == BURST
    assert limit.try_acquire("quiet", "Reason", "1")
    clock.now += REFILL_SECONDS
    assert limit.try_acquire("loud", "Reason", "later")
    assert not limit.try_acquire("loud", "Reason", "later still")


def test_only_adjacent_actions_of_one_kind_run_together() -> None:
    status, first, second = WriteStatus({}), CreatePod("0-0", {}), CreatePod("0-1", {})
    event, gone = RecordEvent("Normal", "A", "b"), DeletePod("p", "u", "why")
    steps = list(_steps([status, first, second, gone, event, event]))
    assert steps == [[status], [first, second], [gone], [event], [event]]


def test_resource_paths_match_the_api() -> None:
    assert POD.path("ns", "p", "status") == "/api/v1/namespaces/ns/pods/p/status"
    assert SWARM.path() == "/apis/modelswarm.io/v1alpha1/modelswarms"
    assert BUDGET.path("ns") == "/apis/policy/v1/namespaces/ns/poddisruptionbudgets"
    assert NODE.path("ignored", "n") == "/api/v1/nodes/n"


def test_pod_without_status_is_pending() -> None:
    view = pod_view({"metadata": {"name": "p", "uid": "u"}})
    assert (view.phase, view.ready, view.node, view.deleting_since) == ("Pending", False, "", None)
    assert view.unschedulable == ""


def test_pod_view_reads_every_field() -> None:
    state = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "too much"}}
    view = pod_view(
        {
            "metadata": {
                "name": "p",
                "uid": "u",
                "creationTimestamp": "2026-11-21T10:00:00Z",
                "deletionTimestamp": "2026-11-21T10:05:30Z",
                "deletionGracePeriodSeconds": 30,
            },
            "spec": {"nodeName": "n"},
            "status": {
                "phase": "Running",
                "conditions": [
                    {"type": "Ready", "status": "True"},
                    {"type": "PodScheduled", "status": "True"},
                    {
                        "type": "DisruptionTarget",
                        "status": "True",
                        "reason": "EvictionByEvictionAPI",
                    },
                ],
                "containerStatuses": [
                    {
                        "restartCount": 2,
                        "ready": True,
                        "started": True,
                        "state": {},
                        "lastState": state,
                    }
                ],
            },
        }
    )
    assert view.ready
    assert view.node == "n"
    assert view.deleting_since == parse_time("2026-11-21T10:05:00Z")
    assert view.deleting_until == parse_time("2026-11-21T10:05:30Z")
    assert view.disruption == "EvictionByEvictionAPI"
    assert (view.container.restarts, view.container.exit_code) == (2, 137)
    assert view.container.exit_message == "too much"


@pytest.mark.parametrize(("status", "since"), [("False", "2026-11-21T10:00:00Z"), ("True", None)])
def test_pod_view_tells_since_when_it_is_unready(status: str, since: str | None) -> None:
    condition = {"type": "Ready", "status": status, "lastTransitionTime": "2026-11-21T10:00:00Z"}
    raw = {"metadata": {"name": "p", "uid": "u"}, "status": {"conditions": [condition]}}
    assert pod_view(raw).unready_since == parse_time(since)


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        ({}, ""),
        ({"unschedulable": True}, "cordoned"),
        (
            {"taints": [{"key": "karpenter.sh/disrupted"}], "unschedulable": True},
            "karpenter.sh/disrupted",
        ),
        ({"taints": [{"key": "nvidia.com/gpu"}]}, ""),
        *(
            ({"taints": [{"key": notice}]}, notice)
            for notice in (
                "aws-node-termination-handler/asg-lifecycle-termination",
                "remediator.kubernetes.azure.com/unschedulable",
            )
        ),
    ],
)
def test_departing_node_names_its_cause(spec: Json, cause: str) -> None:
    node = node_view({"metadata": {"name": "n", "uid": "u"}, "spec": spec})
    assert node.departing == cause
    assert not node.ready


def test_out_of_service_taint_is_read() -> None:
    taint = {"key": "node.kubernetes.io/out-of-service"}
    node = node_view({"metadata": {"name": "n", "uid": "u"}, "spec": {"taints": [taint]}})
    assert node.out_of_service


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
async def test_probes_listen_at_addresses_of_both_families(wildcard: str) -> None:
    probes = ProbeServer(CollectorRegistry(), lambda: "", lambda: "", lambda: None)
    port = await probes.start(wildcard, 0)
    async with aiohttp.ClientSession() as client:
        for host in loopback_hosts():
            target = f"http://{join_target(host, port)}/live"
            assert (await client.get(target)).status == 200
    await probes.stop()
