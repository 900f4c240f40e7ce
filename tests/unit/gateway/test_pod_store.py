"""The pod store and the dialer over it: addresses, names and times of dials; readiness of a gateway."""

from __future__ import annotations

import random
from typing import Any

import pytest

from modelswarm.protocol.identity import Address
from modelswarm_gateway.discovery.dialer import FIRST_PAUSE, MAX_PAUSE, Dialer
from modelswarm_gateway.discovery.pod_store import PodStore, parse_pod
from modelswarm_gateway.discovery.readiness import CATCH_UP_SECONDS, Readiness


def make_pod(
    name: str, *, ip: str = "10.0.0.1", incarnation: str = "1", **more: Any
) -> dict[str, Any]:
    """Return a pod as the API server shows it. `more`: phase, terminating, ready, restarts, uid, port."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": more.get("uid", f"uid-{name}"),
        "labels": {"modelswarm.io/incarnation": incarnation, "other": "x"},
        "managedFields": [{"manager": "kubelet"}],
    }
    if more.get("terminating"):
        metadata["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    container_status = {"restartCount": more.get("restarts", 0), "ready": more.get("ready", False)}
    status: dict[str, Any] = {
        "phase": more.get("phase", "Running"),
        "containerStatuses": [container_status],
    }
    if ip:
        status["podIP"] = ip
    ports = [{"name": "links", "containerPort": more["port"]}] if "port" in more else []
    spec = {"containers": [{"name": "server", "image": "i", "ports": ports}]}
    return {"metadata": metadata, "spec": spec, "status": status}


class DialerHarness:
    """A dialer over a pod store, with a clock that tests move."""

    def __init__(self) -> None:
        self.store, self.now = PodStore(), 100.0
        self.dialled: list[Address] = []
        self.dialer = Dialer(self.store, self.dialled.append, lambda: self.now)

    def put(self, *pods: dict[str, Any], kind: str = "MODIFIED") -> list[str]:
        for each in pods:
            self.store.apply_event("ns", kind, each)
        return self.poll()

    def poll(self, after: float = 0.0) -> list[str]:
        self.now += after
        self.dialled.clear()
        self.dialer.dial_due()
        return [address.peer for address in self.dialled]


def test_running_pod_is_dialled_by_name_and_incarnation() -> None:
    harness = DialerHarness()
    assert harness.put(make_pod("p", ip="", phase="Pending"), kind="ADDED") == []
    assert harness.put(make_pod("p", phase="Pending")) == []
    assert harness.put(make_pod("p", ip="", phase="Running")) == []
    assert harness.put(make_pod("p", incarnation="7")) == ["p/7"]
    assert harness.dialled == [Address("p/7", "10.0.0.1:7000")]
    assert harness.poll(after=60) == []


@pytest.mark.parametrize(
    ("ip", "port", "target"),
    [("10.1.2.3", 7000, "10.1.2.3:7000"), ("fd00::7", 7100, "[fd00::7]:7100")],
)
def test_pod_target_is_its_ip_and_links_port(ip: str, port: int, target: str) -> None:
    assert parse_pod(make_pod("p", ip=ip, port=port)).endpoint.address.target == target


def test_linked_pod_is_dialled_again_only_after_link_loss() -> None:
    harness = DialerHarness()
    harness.put(make_pod("p", ready=True))
    harness.dialer.on_peer_connected("p/1/first", ["m"])
    assert harness.poll(after=60) == []
    harness.dialer.on_peer_lost("p/1/first", "closed")
    assert harness.poll() == []
    assert harness.poll(after=FIRST_PAUSE * 1.1) == ["p/1"]
    harness.dialer.on_peer_connected("p/1/second", ["m"])
    assert harness.poll(after=60) == []


def test_changed_pod_is_dialled_at_once_and_resets_backoff() -> None:
    harness = DialerHarness()
    harness.put(make_pod("p"))
    for _ in range(8):
        harness.dialer.on_peer_lost("p/1", "refused")
        harness.poll(after=MAX_PAUSE * 1.1)
    harness.dialer.on_peer_lost("p/1", "refused")
    assert harness.put(make_pod("p")) == [], "an unchanged pod causes no dial"
    assert harness.put(make_pod("p", ready=True)) == ["p/1"]
    harness.dialer.on_peer_lost("p/1", "refused")
    assert harness.poll(after=FIRST_PAUSE * 1.1) == ["p/1"], "the backoff starts again"


def test_pod_change_during_a_dial_starts_no_second_dial() -> None:
    harness = DialerHarness()
    harness.put(make_pod("p"))
    assert harness.put(make_pod("p", ready=True)) == []
    harness.dialer.on_peer_lost("p/1", "refused")
    assert harness.poll(after=FIRST_PAUSE * 1.1) == ["p/1"]


@pytest.mark.parametrize(
    "change", [{"terminating": True}, {"phase": "Failed"}, {"phase": "Succeeded"}]
)
def test_terminating_or_finished_pod_is_not_redialled(change: dict[str, Any]) -> None:
    harness = DialerHarness()
    harness.put(make_pod("p"))
    harness.dialer.on_peer_connected("p/1/a", ["m"])
    assert harness.put(make_pod("p", **change)) == []
    harness.dialer.on_peer_lost("p/1/a", "closed")
    assert harness.poll(after=60) == []


def test_successor_pod_is_dialled_at_the_same_address() -> None:
    harness = DialerHarness()
    harness.put(make_pod("p-1"))
    harness.dialer.on_peer_connected("p-1/1/a", ["m"])
    assert harness.put(make_pod("p-2", incarnation="2")) == ["p-2/2"]
    assert harness.put(make_pod("p-1"), kind="DELETED") == []
    harness.dialer.on_peer_lost("p-1/1/a", "closed")
    harness.dialer.on_peer_lost("p-2/2", "other identity")
    assert harness.poll(after=1) == ["p-2/2"]


def test_late_event_of_an_old_uid_keeps_the_new_pod() -> None:
    store = PodStore()
    store.replace_scope("ns", [make_pod("p", uid="new", ip="10.0.0.2")])
    store.apply_event("ns", "DELETED", make_pod("p", uid="old", ip="10.0.0.1"))
    assert store.endpoints()["p/1"].address.target == "10.0.0.2:7000"


def test_list_replaces_only_its_own_scope() -> None:
    store = PodStore()
    store.replace_scope("one", [make_pod("a"), make_pod("b")])
    store.replace_scope("two", [make_pod("c")])
    store.replace_scope("one", [make_pod("b")])
    assert set(store.endpoints()) == {"b/1", "c/1"}
    assert store.pod_states() == {"Running": 2}


def test_objects_other_than_server_pods_are_ignored() -> None:
    store = PodStore()
    invalid: list[object] = [
        None,
        5,
        {},
        {"metadata": {}},
        make_pod("x", incarnation=""),
        make_pod("y", ip=""),
    ]
    broken = make_pod("z")
    broken["status"] = "Running"
    store.replace_scope("ns", [*invalid, broken, make_pod("good")])
    store.apply_event("ns", "MODIFIED", {"metadata": {"name": 5}})
    assert set(store.endpoints()) == {"good/1"}


def test_expected_models_come_from_pods_before_they_serve() -> None:
    store = PodStore()
    pending = make_pod("p", phase="Pending", ip="")
    pending["metadata"]["annotations"] = {"modelswarm.io/served-name": "counting"}
    store.replace_scope("ns", [pending, make_pod("without-model")])
    assert store.expected_models() == {"counting"}
    store.apply_event("ns", "DELETED", pending)
    assert store.expected_models() == frozenset()


def test_dialer_is_settled_once_every_pod_has_answered() -> None:
    harness = DialerHarness()
    assert harness.dialer.is_settled()
    harness.put(make_pod("a"), make_pod("b"), make_pod("c", phase="Pending"))
    harness.dialer.on_peer_connected("a/1/x", ["m"])
    assert not harness.dialer.is_settled()
    harness.dialer.on_peer_lost("b/1", "connection refused")
    assert harness.dialer.is_settled()


class ReadinessHarness:
    """The readiness of a gateway, with inputs and a clock that tests set."""

    def __init__(self) -> None:
        self.now, self.settled = 100.0, False
        self.missing_source: str | None = "not listed"
        self.readiness = Readiness(
            lambda: self.missing_source, lambda: self.settled, lambda: self.now
        )


def test_gateway_is_ready_after_catch_up_and_stays_ready() -> None:
    harness = ReadinessHarness()
    harness.now += 60
    assert harness.readiness.unready_reason() == "not listed"
    harness.missing_source = None
    assert harness.readiness.unready_reason() is not None
    harness.settled = True
    assert harness.readiness.unready_reason() is None
    harness.settled, harness.missing_source = False, "gone"
    assert harness.readiness.unready_reason() is None


def test_gateway_is_ready_after_the_catch_up_limit() -> None:
    harness = ReadinessHarness()
    harness.missing_source = None
    assert harness.readiness.unready_reason() is not None
    harness.now += CATCH_UP_SECONDS * 0.9
    assert harness.readiness.unready_reason() is not None
    harness.now += CATCH_UP_SECONDS * 0.2
    assert harness.readiness.unready_reason() is None


@pytest.mark.parametrize("seed", range(20))
def test_random_pod_events_end_in_the_listed_state(seed: int) -> None:
    """After random pod events the store equals a store filled from a list of the current pods."""
    rng = random.Random(seed)
    harness, current_pods = DialerHarness(), dict[str, dict[str, Any]]()
    for step in range(300):
        name = f"p{rng.randrange(8)}"
        if name in current_pods and rng.random() < 0.3:
            harness.put(current_pods.pop(name), kind="DELETED")
        else:
            kind = "MODIFIED" if name in current_pods else "ADDED"
            uid = (
                current_pods[name]["metadata"]["uid"] if name in current_pods else f"{name}-{step}"
            )
            phase = rng.choice(["Pending", "Running", "Running", "Failed"])
            terminating, ready = rng.random() < 0.2, rng.random() < 0.5
            current_pods[name] = make_pod(
                name, uid=uid, phase=phase, terminating=terminating, ready=ready
            )
            harness.put(current_pods[name], kind=kind)
        for peer in harness.poll(after=rng.random() * 3):
            if rng.random() < 0.5:
                harness.dialer.on_peer_connected(f"{peer}/boot", ["m"])
            else:
                harness.dialer.on_peer_lost(peer, "refused")
        expected = PodStore()
        expected.replace_scope("ns", current_pods.values())
        assert harness.store.endpoints() == expected.endpoints()


@pytest.mark.parametrize(("name", "model"), [("a/b", "a/b"), ("a\nforged", ""), ("a" * 129, "")])
def test_model_of_a_pod_has_a_name_that_a_server_may_have(name: str, model: str) -> None:
    """It becomes a place among the known models, a line of the log and a label of metrics."""
    pod = make_pod("p")
    pod["metadata"]["annotations"] = {"modelswarm.io/served-name": name}
    assert parse_pod(pod).model == model
