"""The progress of starts: any answer over HTTP becomes a condition's text, or is ignored."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from support.operator.model_cluster import ModelCluster, make_spec
from typing_extensions import override

from modelswarm.placement.quantity import human_share
from modelswarm_operator.controller.start_progress import (
    MAX_WORDS_LENGTH,
    StartProgressReader,
    describe_progress,
    open_session,
)
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.kube.resources import POD, SWARM
from modelswarm_operator.reconcile.reconciler import reconcile
from modelswarm_operator.reconcile.state.observed import ContainerView, Observed

GIB = 1 << 30
READING = {
    "status": "starting",
    "phase": "reading weights",
    "done": int(3.1 * GIB),
    "total": int(8.2 * GIB),
    "reason": "",
}
SWARM_UID = "6f1c2f4e-0000-4000-8000-000000000001"
STARTED = "2026-11-21T10:00:00Z"
LATER = time.time()


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (READING, "reading weights, 3.1 of 8.2 GiB"),
        (READING | {"done": 9e18}, "reading weights, 8.2 of 8.2 GiB"),
        ({"phase": "importing", "done": 0, "total": 0, "reason": ""}, "importing"),
        ({"phase": "fetching", "reason": "the hub answers 503"}, "fetching, the hub answers 503"),
        ({"ready": False, "reason": "the model is being loaded"}, "the model is being loaded"),
        ({"ready": False, "reason": None}, ""),
        ({"phase": "a\nb\x1b[31m c"}, "a b[31m c"),
        ({"phase": "x" * 1000}, "x" * MAX_WORDS_LENGTH),
        ({"phase": 5}, ""),
        ({"phase": "checking", "total": float("nan")}, ""),
        ({"phase": "checking", "done": -1}, ""),
        ([READING], ""),
    ],
)
def test_answer_becomes_words(body: object, words: str) -> None:
    assert describe_progress(json.dumps(body).encode()) == words


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", b"[" * 100_000, b'{"phase": "a'])
def test_answer_that_is_no_json_has_no_words(body: bytes) -> None:
    assert describe_progress(body) == ""


def test_share_is_in_the_unit_of_the_total() -> None:
    assert human_share(0, 999) == "0 of 999 B"
    assert human_share(512 << 10, 3 << 20) == "0.5 of 3.0 MiB"
    assert human_share(5 * GIB // 2, 40 * GIB) == "2.5 of 40.0 GiB"


class Servers:
    """Servers of one swarm on loopback addresses, each with its own answer, and the cache of their pods."""

    def __init__(self) -> None:
        self.answers: dict[str, tuple[int, bytes]] = {}  # by address; no answer for others
        self.asked: list[str] = []
        self.cache = Cache()
        self.woken: list[set[str]] = []
        self.versions = iter(range(1, 1000))
        servers, stopped = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                address = str(self.request.getsockname()[0])
                servers.asked.append(address)
                if address not in servers.answers:
                    stopped.wait()
                    return
                status, body = servers.answers[address]
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            @override
            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        self.stopped = stopped
        self.server = ThreadingHTTPServer(("0.0.0.0", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        swarm = {"metadata": self.meta("counting", SWARM_UID), "spec": {}}
        self.cache.apply_event(SWARM, False, swarm)

    def meta(self, name: str, uid: str, **more: Any) -> dict[str, Any]:
        version = str(next(self.versions))
        place = {"namespace": "models", **more}
        return {"name": name, "uid": uid, "resourceVersion": version, **place}

    def set_pod(
        self, number: int, *, ready: bool = False, namespace: str = "models", **status: Any
    ) -> None:
        owner = {"controller": True, "kind": "ModelSwarm", "name": "counting", "uid": SWARM_UID}
        container = {"name": "server", "state": {"running": {"startedAt": STARTED}}}
        pod = {
            "metadata": self.meta(
                f"pod-{number}",
                f"uid-{number}",
                namespace=namespace,
                labels={"modelswarm.io/role": "server"},
                ownerReferences=[owner | {"apiVersion": "modelswarm.io/v1alpha1"}],
            ),
            "status": {
                "podIP": f"127.0.0.{number}",
                "conditions": [{"type": "Ready", "status": str(ready)}],
                "containerStatuses": [container],
                **status,
            },
        }
        self.cache.apply_event(POD, False, pod)

    def reader(self) -> StartProgressReader:
        return StartProgressReader(self.cache, self.woken.append, self.server.server_port)

    def progress(self) -> dict[str, str]:
        observed = self.cache.observed(SWARM_UID)
        assert observed is not None
        return dict(observed.start_progress)


@pytest.fixture
def servers() -> Iterator[Servers]:
    started = Servers()
    yield started
    started.stopped.set()
    started.server.shutdown()
    started.server.server_close()


async def test_servers_that_start_are_asked_and_wake_their_swarm(servers: Servers) -> None:
    for number in range(2, 6):
        servers.set_pod(number)
        servers.answers[f"127.0.0.{number}"] = (503, json.dumps(READING).encode())
    servers.answers["127.0.0.3"] = (200, b"{}")
    servers.answers["127.0.0.4"] = (302, b"")
    servers.set_pod(5, ready=True)
    reader = servers.reader()
    async with open_session() as session:
        await reader.read_once(session, LATER)
        assert sorted(servers.asked) == ["127.0.0.2", "127.0.0.3", "127.0.0.4"]
        assert servers.progress() == {"uid-2": "reading weights, 3.1 of 8.2 GiB"}
        await reader.read_once(session, LATER)
        servers.set_pod(2, ready=True)
        await reader.read_once(session, LATER)
    assert servers.progress() == {}
    assert servers.woken == [{SWARM_UID}, set(), {SWARM_UID}]


async def test_silent_and_large_answers_do_not_stop_the_others(servers: Servers) -> None:
    for number in range(2, 6):
        servers.set_pod(number)
    servers.set_pod(6, podIP="nonsense")
    servers.answers["127.0.0.2"] = (503, json.dumps(READING).encode())
    servers.answers["127.0.0.3"] = (503, b'{"phase": "' + b"x" * 10_000_000)
    async with open_session() as session:
        await servers.reader().read_once(session, LATER)
    assert servers.progress() == {"uid-2": "reading weights, 3.1 of 8.2 GiB"}


async def test_pods_of_another_namespace_are_not_asked(servers: Servers) -> None:
    servers.set_pod(2, namespace="other")
    servers.answers["127.0.0.2"] = (503, json.dumps(READING).encode())
    async with open_session() as session:
        await servers.reader().read_once(session, LATER)
    assert (servers.asked, servers.woken) == ([], [set()])


async def test_containers_that_just_started_are_not_asked(servers: Servers) -> None:
    servers.set_pod(2)
    servers.set_pod(3, containerStatuses=[])
    servers.set_pod(4, podIP="")
    observed = servers.cache.observed(SWARM_UID)
    assert observed is not None
    started = {pod.name: pod for pod in observed.pods}["pod-2"].container.running_since
    assert started is not None
    async with open_session() as session:
        await servers.reader().read_once(session, started + 1.0)
    assert (servers.asked, servers.progress()) == ([], {})


def start_slowly(spans: int, words: list[str]) -> tuple[ModelCluster, Observed]:
    """Return a cluster with running servers that are not ready, and the observed state with their progress."""
    cluster = ModelCluster(spec=make_spec(spans, 1))
    cluster.run_turn()
    cluster.run_turn()
    for name in sorted(cluster.pods):
        running = ContainerView(started=True, running_since=cluster.now)
        view = cluster.pods[name].view
        cluster.pods[name].view = replace(view, phase="Running", container=running)
    uids = [cluster.pods[name].view.uid for name in sorted(cluster.pods)]
    progress = dict(zip(uids, words, strict=False))
    return cluster, replace(cluster.observe(), start_progress=progress)


def test_conditions_say_what_a_start_waits_for() -> None:
    cluster, observed = start_slowly(2, ["reading weights, 3.1 of 8.2 GiB"])
    cluster.run_turn(observed)
    first, _ = sorted(cluster.pods)
    ready, progressing = cluster.condition("Ready"), cluster.condition("Progressing")
    assert (ready["status"], ready["reason"]) == ("False", "Starting")
    assert ready["message"] == (
        f"No server is ready yet for blocks 0:4, 4:8. {first}: reading weights, 3.1 of 8.2 GiB."
    )
    assert progressing["message"] == (
        f"0 of 2 servers are ready. {first}: reading weights, 3.1 of 8.2 GiB."
    )
    assert cluster.condition("Degraded")["status"] == "False"


def test_progress_of_many_servers_is_shortened() -> None:
    cluster, observed = start_slowly(8, [f"phase {number}" for number in range(8)])
    cluster.run_turn(observed)
    message = cluster.condition("Ready")["message"]
    assert "phase 0; " in message and "phase 2; and 5 more." in message
    assert "phase 3" not in message


def test_progress_of_ready_servers_is_not_shown() -> None:
    cluster = ModelCluster()
    cluster.settle()
    pod = cluster.pods[cluster.ready_pods()[0]].view
    observed = replace(cluster.observe(), start_progress={pod.uid: "reading weights"})
    assert reconcile(observed, cluster.policy, cluster.now).actions == []
