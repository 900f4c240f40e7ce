"""The book of pods and the directory over it: who is dialled, by what name, and when."""

from __future__ import annotations

import random
from typing import Any

import pytest

from modelswarm.protocol.identity import Address
from modelswarm_gateway.discovery.dialer import FIRST_PAUSE, MAX_PAUSE, Dialer
from modelswarm_gateway.discovery.pod_store import PodStore, parse_pod
from modelswarm_gateway.discovery.readiness import CATCH_UP_SECONDS, Readiness


def pod(name: str, *, ip: str = "10.0.0.1", incarnation: str = "1", **more: Any) -> dict[str, Any]:
    """As the API server shows it. `more`: phase, leaving, ready, restarts, uid, port."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": "ns",
        "uid": more.get("uid", f"uid-{name}"),
        "labels": {"modelswarm.io/incarnation": incarnation, "other": "x"},
        "managedFields": [{"manager": "kubelet"}],
    }
    if more.get("leaving"):
        metadata["deletionTimestamp"] = "2026-11-21T12:00:00Z"
    life = {"restartCount": more.get("restarts", 0), "ready": more.get("ready", False)}
    status: dict[str, Any] = {"phase": more.get("phase", "Running"), "containerStatuses": [life]}
    if ip:
        status["podIP"] = ip
    ports = [{"name": "links", "containerPort": more["port"]}] if "port" in more else []
    spec = {"containers": [{"name": "server", "image": "i", "ports": ports}]}
    return {"metadata": metadata, "spec": spec, "status": status}


class Watched:
    """A directory over a book, with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.book, self.now = PodStore(), 100.0
        self.dialled: list[Address] = []
        self.directory = Dialer(self.book, self.dialled.append, lambda: self.now)

    def put(self, *pods: dict[str, Any], kind: str = "MODIFIED") -> list[str]:
        for each in pods:
            self.book.apply_event("ns", kind, each)
        return self.poll()

    def poll(self, after: float = 0.0) -> list[str]:
        self.now += after
        self.dialled.clear()
        self.directory.dial_due()
        return [address.peer for address in self.dialled]


def test_running_pod_is_dialled_by_name_and_incarnation() -> None:
    watched = Watched()
    assert watched.put(pod("p", ip="", phase="Pending"), kind="ADDED") == []
    assert watched.put(pod("p", phase="Pending")) == []
    assert watched.put(pod("p", ip="", phase="Running")) == []
    assert watched.put(pod("p", incarnation="7")) == ["p/7"]
    assert watched.dialled == [Address("p/7", "10.0.0.1:7000")]
    assert watched.poll(after=60) == []


@pytest.mark.parametrize(
    ("ip", "port", "target"),
    [("10.1.2.3", 7000, "10.1.2.3:7000"), ("fd00::7", 7100, "[fd00::7]:7100")],
)
def test_pod_target_is_its_ip_and_links_port(ip: str, port: int, target: str) -> None:
    assert parse_pod(pod("p", ip=ip, port=port)).endpoint.address.target == target


def test_linked_pod_is_dialled_again_only_after_link_loss() -> None:
    watched = Watched()
    watched.put(pod("p", ready=True))
    watched.directory.on_peer_connected("p/1/first", "m")
    assert watched.poll(after=60) == []
    watched.directory.on_peer_lost("p/1/first", "closed")
    assert watched.poll() == []
    assert watched.poll(after=FIRST_PAUSE * 1.1) == ["p/1"]
    watched.directory.on_peer_connected("p/1/second", "m")
    assert watched.poll(after=60) == []


def test_changed_pod_is_dialled_at_once_and_resets_backoff() -> None:
    watched = Watched()
    watched.put(pod("p"))
    for _ in range(8):
        watched.directory.on_peer_lost("p/1", "refused")
        watched.poll(after=MAX_PAUSE * 1.1)
    watched.directory.on_peer_lost("p/1", "refused")
    assert watched.put(pod("p")) == [], "nothing is new"
    assert watched.put(pod("p", ready=True)) == ["p/1"]
    watched.directory.on_peer_lost("p/1", "refused")
    assert watched.poll(after=FIRST_PAUSE * 1.1) == ["p/1"], "the pauses begin anew"


def test_pod_change_during_a_dial_starts_no_second_dial() -> None:
    watched = Watched()
    watched.put(pod("p"))
    assert watched.put(pod("p", ready=True)) == []
    watched.directory.on_peer_lost("p/1", "refused")
    assert watched.poll(after=FIRST_PAUSE * 1.1) == ["p/1"]


@pytest.mark.parametrize("change", [{"leaving": True}, {"phase": "Failed"}, {"phase": "Succeeded"}])
def test_terminating_or_finished_pod_is_not_redialled(change: dict[str, Any]) -> None:
    watched = Watched()
    watched.put(pod("p"))
    watched.directory.on_peer_connected("p/1/a", "m")
    assert watched.put(pod("p", **change)) == []
    watched.directory.on_peer_lost("p/1/a", "closed")
    assert watched.poll(after=60) == []


def test_successor_pod_is_dialled_at_the_same_address() -> None:
    watched = Watched()
    watched.put(pod("p-1"))
    watched.directory.on_peer_connected("p-1/1/a", "m")
    assert watched.put(pod("p-2", incarnation="2")) == ["p-2/2"]
    assert watched.put(pod("p-1"), kind="DELETED") == []
    watched.directory.on_peer_lost("p-1/1/a", "closed")
    watched.directory.on_peer_lost("p-2/2", "other identity")
    assert watched.poll(after=1) == ["p-2/2"]


def test_late_event_of_an_old_uid_keeps_the_new_pod() -> None:
    book = PodStore()
    book.replace_scope("ns", [pod("p", uid="new", ip="10.0.0.2")])
    book.apply_event("ns", "DELETED", pod("p", uid="old", ip="10.0.0.1"))
    assert book.endpoints()["p/1"].address.target == "10.0.0.2:7000"


def test_list_replaces_only_its_own_scope() -> None:
    book = PodStore()
    book.replace_scope("one", [pod("a"), pod("b")])
    book.replace_scope("two", [pod("c")])
    book.replace_scope("one", [pod("b")])
    assert set(book.endpoints()) == {"b/1", "c/1"}
    assert book.pod_states() == {"Running": 2}


def test_objects_other_than_server_pods_are_ignored() -> None:
    book = PodStore()
    odd: list[object] = [None, 5, {}, {"metadata": {}}, pod("x", incarnation=""), pod("y", ip="")]
    bad = pod("z")
    bad["status"] = "Running"
    book.replace_scope("ns", [*odd, bad, pod("good")])
    book.apply_event("ns", "MODIFIED", {"metadata": {"name": 5}})
    assert set(book.endpoints()) == {"good/1"}


def test_expected_models_come_from_pods_before_they_serve() -> None:
    book = PodStore()
    coming = pod("p", phase="Pending", ip="")
    coming["metadata"]["annotations"] = {"modelswarm.io/served-name": "counting"}
    book.replace_scope("ns", [coming, pod("silent")])
    assert book.expected_models() == {"counting"}
    book.apply_event("ns", "DELETED", coming)
    assert book.expected_models() == frozenset()


def test_dialer_is_settled_once_every_pod_was_tried() -> None:
    watched = Watched()
    assert watched.directory.is_settled()
    watched.put(pod("a"), pod("b"), pod("c", phase="Pending"))
    watched.directory.on_peer_connected("a/1/x", "m")
    assert not watched.directory.is_settled()
    watched.directory.on_peer_lost("b/1", "refused")
    assert watched.directory.is_settled()


class Catching:
    """A gateway that catches up, moved by hand."""

    def __init__(self) -> None:
        self.now, self.settled = 100.0, False
        self.unknown: str | None = "not listed"
        self.readiness = Readiness(lambda: self.unknown, lambda: self.settled, lambda: self.now)


def test_gateway_is_ready_after_catch_up_and_stays_ready() -> None:
    it = Catching()
    it.now += 60
    assert it.readiness.unready_reason() == "not listed"
    it.unknown = None
    assert it.readiness.unready_reason() is not None
    it.settled = True
    assert it.readiness.unready_reason() is None
    it.settled, it.unknown = False, "gone"
    assert it.readiness.unready_reason() is None


def test_gateway_is_ready_after_the_catch_up_limit() -> None:
    it = Catching()
    it.unknown = None
    assert it.readiness.unready_reason() is not None
    it.now += CATCH_UP_SECONDS * 0.9
    assert it.readiness.unready_reason() is not None
    it.now += CATCH_UP_SECONDS * 0.2
    assert it.readiness.unready_reason() is None


@pytest.mark.parametrize("seed", range(20))
def test_random_pod_events_end_in_the_listed_state(seed: int) -> None:
    """Random lives of pods, heard as events; what is present is what a list of the last state says."""
    rng = random.Random(seed)
    watched, truth = Watched(), dict[str, dict[str, Any]]()
    for step in range(300):
        name = f"p{rng.randrange(8)}"
        if name in truth and rng.random() < 0.3:
            watched.put(truth.pop(name), kind="DELETED")
        else:
            kind = "MODIFIED" if name in truth else "ADDED"
            uid = truth[name]["metadata"]["uid"] if name in truth else f"{name}-{step}"
            phase = rng.choice(["Pending", "Running", "Running", "Failed"])
            leaving, ready = rng.random() < 0.2, rng.random() < 0.5
            truth[name] = pod(name, uid=uid, phase=phase, leaving=leaving, ready=ready)
            watched.put(truth[name], kind=kind)
        for peer in watched.poll(after=rng.random() * 3):
            if rng.random() < 0.5:
                watched.directory.on_peer_connected(f"{peer}/boot", "m")
            else:
                watched.directory.on_peer_lost(peer, "refused")
        listed = PodStore()
        listed.replace_scope("ns", truth.values())
        assert watched.book.endpoints() == listed.endpoints()
