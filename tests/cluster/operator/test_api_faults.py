"""Faults of the API server: the end is that of a clean run, and no more pods than needed were created.

Tests that kill parts of the control plane have their own control plane. Tests that end watches have their own
operator, whose pauses between watches would slow down later tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.kubernetes.api_client import CRD_NAME, PODS, SWARMS, ApiClient, Json, install_crd
from support.kubernetes.fault_proxy import Call, Fault
from support.kubernetes.operator_scene import Scene, scene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.layout import Layout


def first(
    count: int, fault: Fault, chosen: Callable[[Call], bool]
) -> Callable[[Call], Fault | None]:
    """Return a fault for the first `count` chosen requests."""
    left = [count]

    def decide(call: Call) -> Fault | None:
        if not chosen(call) or left[0] <= 0:
            return None
        left[0] -= 1
        return fault

    return decide


def is_status_write(call: Call) -> bool:
    return call.verb == "PUT" and call.path.endswith("/status")


def is_pod_create(call: Call) -> bool:
    return call.verb == "POST" and call.path.endswith("/pods")


def is_pod_list(call: Call) -> bool:
    return call.verb == "GET" and call.path.endswith("/pods") and not call.watch


def is_write(call: Call) -> bool:
    return call.writes


def watched(stage: Scene) -> None:
    """Wait for a settled swarm and for the operator's watches, which settling does not need."""
    stage.apply(swarm())
    stage.settle()
    for plural in ("pods", "modelswarms"):
        stage.wait(f"a watch of {plural}", partial(stage.proxy.watching, plural))


def test_pods_that_die_behind_a_frozen_watch_are_replaced(stage: Scene) -> None:
    watched(stage)
    stage.proxy.frozen.add("pods")
    for pod in stage.live_pods()[:2]:
        stage.delete_pod(pod)
    stage.wait("replacements", lambda: len(stage.created_pods()) == 6)
    stage.settle()
    stage.wait_quiet()
    stage.proxy.frozen.clear()
    stage.check_quiet(3.0)
    stage.check_invariants()
    assert len(stage.created_pods()) == 6


@pytest.mark.full
def test_spec_changed_behind_a_frozen_watch_is_followed(stage: Scene) -> None:
    watched(stage)
    stage.proxy.frozen.add("modelswarms")
    stage.edit(replicas=1)
    stage.settle(servers=2)
    stage.check_invariants()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["ADDED", "DELETED"])
def test_one_event_that_never_arrives_changes_nothing(stage: Scene, kind: str) -> None:
    dropped: list[str] = []

    def drops(call: Call, event: Json) -> bool:
        if call.plural != "pods" or event["type"] != kind or dropped:
            return False
        dropped.append(event["object"]["metadata"]["name"])
        return True

    stage.proxy.drops = drops
    watched(stage)
    stage.delete_pod(stage.live_pods()[0])
    stage.wait("a replacement", lambda: len(stage.created_pods()) == 5)
    stage.settle()
    stage.wait("an event that is dropped", lambda: dropped)
    assert len(stage.created_pods()) == 5
    stage.check_quiet(3.0)


@pytest.mark.full
def test_pods_deleted_in_a_watch_gap_are_forgotten(stage: Scene) -> None:
    watched(stage)
    stage.proxy.frozen.add("pods")
    lost = [pod["metadata"]["name"] for pod in stage.live_pods()[:2]]
    for name in lost:
        stage.delete_pod(name)
    expired = {"kind": "Status", "status": "Failure", "code": 410, "reason": "Expired"}
    assert stage.proxy.inject("pods", {"type": "ERROR", "object": expired}) >= 1
    stage.proxy.frozen.clear()
    stage.wait("replacements", lambda: len(stage.created_pods()) == 6)
    stage.settle()
    stage.wait(
        "four ready pods in the metrics",
        lambda: stage.operator.metric("modelswarm_operator_pods", state="ready") == 4,
    )
    assert not {pod["metadata"]["name"] for pod in stage.pods()} & set(lost)


@pytest.mark.full
def test_old_versions_replayed_by_a_watch_change_nothing(stage: Scene) -> None:
    """A watch of a lagging API server repeats a deleted pod, an older spec and an older swarm."""
    watched(stage)
    old_swarm, old_pods = stage.stored_swarm(), stage.pods()
    stage.edit(replicas=1)
    stage.settle(servers=2)
    made = len(stage.created_pods())
    for kind in ("ADDED", "MODIFIED"):
        stage.proxy.inject("modelswarms", {"type": kind, "object": old_swarm})
        for pod in old_pods:
            stage.proxy.inject("pods", {"type": kind, "object": pod})
    stage.check_quiet(4.0)
    assert len(stage.created_pods()) == made
    stage.settle(servers=2)


@pytest.mark.full
def test_events_of_a_deleted_namesake_change_nothing(stage: Scene) -> None:
    watched(stage)
    old_swarm, old_pods = stage.stored_swarm() or {}, stage.pods()
    stage.delete_swarm()
    stage.wait_gone()
    stage.apply(swarm())
    stage.settle()
    names = {pod["metadata"]["name"] for pod in stage.pods()}
    stage.proxy.inject("modelswarms", {"type": "MODIFIED", "object": old_swarm})
    for pod in old_pods:
        stage.proxy.inject("pods", {"type": "MODIFIED", "object": pod})
    old_swarm["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    stage.proxy.inject("modelswarms", {"type": "MODIFIED", "object": old_swarm})
    time.sleep(4)
    stage.settle()
    assert {pod["metadata"]["name"] for pod in stage.pods()} == names


@pytest.mark.parametrize(
    ("code", "reason"),
    [(409, "Conflict"), (500, "InternalError")],
)
def test_writes_refused_for_a_while_are_made_later(stage: Scene, code: int, reason: str) -> None:
    stage.proxy.fault = first(6, Fault(answer=code, reason=reason), is_write)
    stage.apply(swarm())
    stage.settle()
    stage.check_invariants()
    assert len(stage.created_pods()) == 4


@pytest.mark.full
def test_refused_finalizer_is_an_event(stage: Scene) -> None:
    """A policy may refuse it. Without a finalizer there are no pods and no status, which would tell the reason."""

    def refuse(call: Call) -> Fault | None:
        is_finalizer = (call.verb, call.plural) == ("PATCH", "modelswarms")
        return Fault(answer=403, reason="Forbidden") if is_finalizer else None

    stage.proxy.fault = refuse
    stage.apply(swarm())
    path = f"/apis/events.k8s.io/v1/namespaces/{stage.namespace}/events"

    def refusals() -> list[dict[str, Any]]:
        events = stage.client.get(path)["items"]
        return [each for each in events if each["reason"] == "FinalizerRefused"]

    [event] = stage.wait("the Event", refusals)
    assert event["type"] == "Warning"
    assert event["note"].startswith("The swarm's finalizer cannot be set: ")
    assert "the fault proxy answers 403" in event["note"] and not stage.created_pods()
    stage.proxy.fault = lambda call: None
    stage.settle()


@pytest.mark.full
def test_conflicts_on_status_writes_cost_no_pod(stage: Scene) -> None:
    count = [0]

    def every_second(call: Call) -> Fault | None:
        if not is_status_write(call):
            return None
        count[0] += 1
        return Fault(answer=409, reason="Conflict") if count[0] % 2 else None

    stage.proxy.fault = every_second
    stage.apply(swarm())
    stage.settle()
    stage.edit(replicas=3)
    stage.settle(servers=6)
    assert len(stage.created_pods()) == 6


@pytest.mark.full
def test_frequent_foreign_writes_do_not_stop_the_operator(api: ApiLevel, stage: Scene) -> None:
    stop = threading.Event()
    stage.apply(swarm(replicas=1))

    def scribble() -> None:
        with ApiClient(api) as client:
            path, turn = f"{SWARMS.format(stage.namespace)}/counting", 0
            while not stop.wait(0.02):
                turn += 1
                client.patch(path, {"metadata": {"labels": {"turn": str(turn)}}})

    writer = threading.Thread(target=scribble)
    writer.start()
    try:
        stage.settle(servers=2)
        stage.edit(replicas=2)
        stage.settle()
    finally:
        stop.set()
        writer.join()
    stage.check_invariants()
    assert len(stage.created_pods()) == 4


@pytest.mark.full
def test_retry_after_is_obeyed(stage: Scene) -> None:
    fault = Fault(answer=429, reason="TooManyRequests", retry_after=3)
    stage.proxy.fault = first(1, fault, is_status_write)
    refused_at: list[float] = []
    inner = stage.proxy.fault

    def note(call: Call) -> Fault | None:
        decided = inner(call)
        if is_status_write(call):
            refused_at.append(time.monotonic())
        return decided

    stage.proxy.fault = note
    stage.apply(swarm())
    stage.settle()
    assert refused_at[1] - refused_at[0] >= 3.0
    assert len(stage.created_pods()) == 4


@pytest.mark.full
@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.soak)])
def test_failing_api_server_is_waited_for(fresh_stage: Scene, seconds: int) -> None:
    fresh_stage.apply(swarm())
    fresh_stage.settle()
    fresh_stage.proxy.fault = lambda call: Fault(answer=500)
    fresh_stage.proxy.cut_watches()
    for pod in fresh_stage.live_pods()[:2]:
        fresh_stage.delete_pod(pod)
    time.sleep(seconds)
    assert fresh_stage.operator.running
    assert fresh_stage.operator.probe("live")[0] == 200
    asked = len(fresh_stage.proxy.calls)
    fresh_stage.proxy.fault = lambda call: None
    fresh_stage.wait("replacements", lambda: len(fresh_stage.created_pods()) == 6)
    fresh_stage.settle()
    assert asked < 100 + 20 * seconds  # the operator backs off
    fresh_stage.check_invariants()


@pytest.mark.full
@pytest.mark.parametrize("code", [400, 500])
def test_error_inside_a_watch_starts_it_again(fresh_stage: Scene, code: int) -> None:
    watched(fresh_stage)
    status = {"kind": "Status", "status": "Failure", "code": code, "reason": "InternalError"}
    assert fresh_stage.proxy.inject("pods", {"type": "ERROR", "object": status}) >= 1
    fresh_stage.wait("watching again", lambda: fresh_stage.operator.metric(RESTARTS) >= 1)
    fresh_stage.delete_pod(fresh_stage.live_pods()[0])
    fresh_stage.wait("a replacement", lambda: len(fresh_stage.created_pods()) == 5)
    fresh_stage.settle()
    assert fresh_stage.operator.running


RESTARTS = "modelswarm_operator_watch_restarts_total"


@pytest.mark.full
def test_refused_watch_is_tried_again(fresh_stage: Scene) -> None:
    watched(fresh_stage)
    fresh_stage.proxy.fault = first(12, Fault(answer=403), lambda call: call.watch)
    fresh_stage.proxy.cut_watches()
    fresh_stage.delete_pod(fresh_stage.live_pods()[0])
    fresh_stage.wait("a replacement", lambda: len(fresh_stage.created_pods()) == 5)
    fresh_stage.settle()
    assert fresh_stage.operator.running
    fresh_stage.proxy.fault = lambda call: None
    fresh_stage.wait("watching again", lambda: fresh_stage.proxy.watching("pods"))


@pytest.mark.full
def test_list_that_ends_with_410_is_made_again(stage: Scene) -> None:
    """The list is compacted between two pages."""
    stage.apply(swarm())
    stage.settle()
    stage.proxy.fault = first(3, Fault(answer=410, reason="Expired"), is_pod_list)
    stage.delete_pod(stage.live_pods()[0])
    stage.wait("a replacement", lambda: len(stage.created_pods()) == 5)
    stage.settle()


@pytest.mark.full
def test_request_without_a_response_is_given_up(stage: Scene) -> None:
    stage.proxy.fault = first(1, Fault(hang=60), is_pod_create)
    stage.apply(swarm())
    stage.settle(seconds=120)
    stage.check_invariants()
    assert len(stage.created_pods()) == 4


@pytest.mark.full
@pytest.mark.parametrize("chosen", [is_status_write, is_pod_list])
def test_truncated_response_is_an_error(stage: Scene, chosen: Callable[[Call], bool]) -> None:
    stage.proxy.fault = first(2, Fault(truncated=True), chosen)
    stage.apply(swarm())
    stage.settle()
    stage.check_invariants()
    assert len(stage.created_pods()) == 4


def test_create_without_a_response_is_not_repeated(stage: Scene) -> None:
    stage.proxy.fault = first(4, Fault(after=lambda: None), is_pod_create)
    stage.apply(swarm())
    stage.settle()
    stage.check_invariants()
    assert len(stage.created_pods()) == 4


@pytest.mark.full
def test_refused_token_is_read_again(fresh_stage: Scene) -> None:
    """The API server refuses the old token; the file has a new one."""
    fresh_stage.apply(swarm())
    fresh_stage.settle()
    fresh = fresh_stage.account()
    fresh_stage.kubeconfig.write_bytes(fresh.read_bytes())
    fresh_stage.proxy.fault = first(3, Fault(answer=401, reason="Unauthorized"), lambda call: True)
    fresh_stage.proxy.cut_watches()
    fresh_stage.delete_pod(fresh_stage.live_pods()[0])
    fresh_stage.wait("a replacement", lambda: len(fresh_stage.created_pods()) == 5)
    fresh_stage.settle()
    fresh_stage.wait("watching again", lambda: fresh_stage.proxy.watching("pods"))


@pytest.mark.full
def test_swarm_deleted_while_it_is_created_leaves_nothing(stage: Scene) -> None:
    for number in range(1, 30):
        seen = [0]

        def remove(call: Call, number: int = number, seen: list[int] = seen) -> Fault | None:
            seen[0] += call.writes
            if seen[0] == number and call.writes:
                stage.delete_swarm()
            return None

        stage.proxy.fault = remove
        stage.apply(swarm(replicas=1))
        stage.wait("its end", lambda: stage.stored_swarm() is None or stage.is_settled(servers=2))
        if stage.stored_swarm() is not None and seen[0] < number:
            assert number > 4
            break
        stage.wait_gone()
    stage.proxy.fault = lambda call: None
    stage.delete_swarm()
    stage.wait_gone()


@pytest.fixture(scope="module")
def own_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    level = ApiLevel(Layout(tmp_path_factory.mktemp("own")), ApiSettings())
    try:
        yield level.start()
    finally:
        level.down()


@pytest.fixture
def own_stage(own_api: ApiLevel, tmp_path: Path) -> Iterator[Scene]:
    with (
        own_api.namespace() as namespace,
        scene(own_api, namespace, tmp_path, "--resync", "2") as made,
        made.operator,
    ):
        made.operator.wait_ready()
        yield made
        made.delete_swarm()
        made.wait_gone()
        made.operator.check_log()


def test_operator_goes_on_after_an_api_server_kill(own_api: ApiLevel, own_stage: Scene) -> None:
    own_stage.apply(swarm())
    own_stage.settle()
    own_api.stop_apiserver()
    time.sleep(3)
    assert own_stage.operator.running
    own_api.start_apiserver()
    own_stage.delete_pod(own_stage.live_pods()[0])
    own_stage.wait("a replacement", lambda: len(own_stage.created_pods()) == 5)
    own_stage.settle()
    own_stage.wait_quiet()
    own_stage.check_quiet(4.0)


@pytest.mark.full
def test_operator_goes_on_after_an_etcd_kill(own_api: ApiLevel, own_stage: Scene) -> None:
    own_stage.apply(swarm())
    own_stage.settle()
    own_api.stop_etcd()
    time.sleep(3)
    own_api.start_etcd()
    # The first writes may fail: the API server does not repeat a write after it lost etcd.
    own_stage.wait("an edit", lambda: own_stage.edit(replicas=3))
    own_stage.settle(servers=6)
    own_stage.check_invariants()


@pytest.mark.full
def test_frozen_api_server_is_waited_for(own_api: ApiLevel, own_stage: Scene) -> None:
    own_stage.apply(swarm())
    own_stage.settle()
    own_api.pause_apiserver()
    time.sleep(12)
    assert own_stage.operator.running
    assert own_stage.operator.probe("live")[0] == 200
    own_api.resume_apiserver()
    own_stage.delete_pod(own_stage.live_pods()[0])
    own_stage.wait("a replacement", lambda: len(own_stage.created_pods()) == 5)
    own_stage.settle()


@pytest.mark.full
def test_operator_goes_on_after_the_crd_was_deleted(own_api: ApiLevel, own_stage: Scene) -> None:
    own_stage.apply(swarm())
    own_stage.settle()
    own_api.kubectl("delete", "crd", CRD_NAME, "--timeout=60s")
    own_stage.wait("the log to say so", lambda: "is not installed" in own_stage.operator.text())
    assert own_stage.operator.running
    for pod in own_stage.client.items(PODS.format(own_stage.namespace)):
        own_stage.delete_pod(pod)
    install_crd(own_api)
    own_stage.apply(swarm())
    own_stage.settle()
    own_stage.wait("watching again", lambda: own_stage.proxy.watching("modelswarms"))
    own_stage.edit(replicas=1)
    own_stage.settle(servers=2)
