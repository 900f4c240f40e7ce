"""The gateway finds servers by their pods: a real API server, and real servers with their own addresses.

Streams continue and discovery catches up while pods, watches and the API server fail and recover.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import httpx
import pytest
from support.eventually import eventually
from support.kubernetes.pods_with_processes import PodSwarm
from support.processes.http_requests import FOREVER, READ_ON, expected_tokens, tokens_of, whole
from support.processes.swarm import MODEL, Endpoints

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from tools.devcluster.control_plane.api_level import ApiLevel, ApiSettings
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.layout import Layout

pytestmark = pytest.mark.full


@pytest.fixture
def pods(tmp_path: Path, api: ApiLevel, namespace: str) -> Iterator[PodSwarm]:
    with PodSwarm(tmp_path, api, namespace) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def own_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiLevel]:
    """Yield this module's own API level, which tests kill and pause. Its history is compacted every second."""
    settings = ApiSettings(apiserver_flags=("--etcd-compaction-interval=1s",))
    level = ApiLevel(Layout(tmp_path_factory.mktemp("own")), settings)
    try:
        yield level.start()
    finally:
        level.down()


@pytest.fixture
def own_pods(tmp_path: Path, own_api: ApiLevel) -> Iterator[PodSwarm]:
    with own_api.namespace() as namespace, PodSwarm(tmp_path, own_api, namespace) as swarm:
        yield swarm


BODY = FOREVER
SHORT_TOKENS = 300
SHORT = BODY | {"max_tokens": SHORT_TOKENS}
READ_SECONDS = 60.0  # seconds; generous
TWICE = {"a0": "0:2", "a1": "2:4", "b0": "0:2", "b1": "2:4"}
SMALL = [
    (socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
]  # a larger buffer of the kernel would take most of the answer


class Reader:
    """A client whose thread reads one stream slowly."""

    def __init__(self, endpoints: Endpoints, body: dict[str, Any] = BODY) -> None:
        self.tokens: list[int] = []
        self._end = 0
        self._request = (f"{endpoints.url}/v1/completions", body | {"stream": True})
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        url, body = self._request
        slow = httpx.Client(timeout=30, transport=httpx.HTTPTransport(socket_options=SMALL))
        with slow, slow.stream("POST", url, json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in filter(None, answer.iter_lines()):
                self.tokens += tokens_of(line)
                if self._end and len(self.tokens) >= self._end:
                    return
                time.sleep(0.003)

    def wait(self, tokens: int) -> None:
        eventually(f"{tokens} tokens", lambda: len(self.tokens) >= tokens)

    def more(self, tokens: int = 30) -> None:
        self.wait(len(self.tokens) + tokens)

    def check(self, tokens: int = READ_ON) -> None:
        """Read `tokens` more, close the stream, and compare the received answer with the reference."""
        self._end = len(self.tokens) + tokens
        self._thread.join(READ_SECONDS)
        assert len(self.tokens) >= self._end, f"the stream ended after {len(self.tokens)} tokens"
        assert self.tokens == expected_tokens(len(self.tokens))


def route(endpoints: Endpoints) -> list[str]:
    """Return the pods on the route of the only routed session."""
    with grpc.insecure_channel(endpoints.admin) as channel:
        seen = api_pb2_grpc.SwarmStub(channel).List(api_pb2.ListRequest(), timeout=10)
    [session] = [session for session in seen.sessions if session.route]
    return [hop.peer.partition("/")[0] for hop in session.route]


def peers(endpoints: Endpoints) -> set[str]:
    with grpc.insecure_channel(endpoints.admin) as channel:
        seen = api_pb2_grpc.SwarmStub(channel).List(api_pb2.ListRequest(), timeout=10)
    return {server.peer.partition("/")[0] for server in seen.servers}


def sees(endpoints: Endpoints, names: set[str]) -> bool:
    return names <= peers(endpoints)


def knows(endpoints: Endpoints, names: set[str]) -> bool:
    return names == peers(endpoints)


def ready(endpoints: Endpoints) -> tuple[bool, str]:
    answer = httpx.get(f"{endpoints.url}/ready", timeout=10)
    body = answer.json()
    assert body["ready"] is (answer.status_code == 200)
    return body["ready"], body["reason"] or ""


# ---- pods that are created and deleted


def test_stream_outlives_each_pod_of_its_route(pods: PodSwarm) -> None:
    pods.start_pods(TWICE)
    endpoints = pods.pod_gateway(whole=4)
    reader = Reader(endpoints)
    reader.wait(20)
    for name in ("a0", "b1"):
        pods.kill(name)
        reader.more(40)
        pods.run(name)  # the container restarts in the same pod: a new process at the same address
        eventually("it is linked again", lambda: pods.linked(endpoints) == 4)
    for name in ("b0", "a1"):
        pods.kill(name)
    reader.check()


def test_pod_is_linked_when_ready_and_forgotten_when_gone(pods: PodSwarm) -> None:
    endpoints = pods.pod_gateway()
    assert ready(endpoints) == (True, "")  # no servers: nothing to wait for
    assert httpx.get(f"{endpoints.url}/v1/models", timeout=10).json()["data"] == []
    assert ask(endpoints).status_code == 404
    names = ("a0", "a1", "a2")
    for name in names:
        pods.start_pod(name, "0:4", serves=False)
    eventually("the model is expected", lambda: ask(endpoints).status_code == 503)
    [model] = httpx.get(f"{endpoints.url}/v1/models", timeout=10).json()["data"]
    assert (model["id"], model["ready"]) == (MODEL, False)
    time.sleep(3.0)  # the pauses between two dials grow
    seconds = [until_linked(pods, endpoints, name, count) for count, name in enumerate(names, 1)]
    assert median(seconds) < 1.0, f"readiness is a reason to dial at once, not after {seconds}"
    eventually("a model answers", lambda: ask(endpoints).status_code == 200)
    for name in names:
        pods.remove_pod(name)
    eventually("they are gone", lambda: pods.linked(endpoints) == 0)


def until_linked(pods: PodSwarm, endpoints: Endpoints, name: str, count: int) -> float:
    """Start the pod's server, and return the seconds from its readiness to its link."""
    pods.run(name)
    came = time.monotonic()
    eventually(f"{name} is linked", lambda: pods.linked(endpoints) == count)
    return time.monotonic() - came


def ask(endpoints: Endpoints) -> httpx.Response:
    return httpx.post(f"{endpoints.url}/v1/completions", json=BODY | {"max_tokens": 9}, timeout=30)


def test_new_gateway_is_ready_only_when_it_can_answer(pods: PodSwarm) -> None:
    """A Service would send requests to a ready gateway that still refuses them with "no such model"."""
    pods.start_pods(TWICE)
    pods.start_pod("starting", "0:4", serves=False)  # readiness does not wait for this one
    for name in ("gateway-0", "gateway-1"):
        endpoints = pods.pod_gateway(name=name)  # returns as soon as /ready returns 200
        assert ask(endpoints).status_code == 200
        assert pods.linked(endpoints) == 4


def test_terminating_pod_keeps_its_link_and_gets_no_new_one(pods: PodSwarm) -> None:
    pods.start_pods(TWICE)
    endpoints = pods.pod_gateway(whole=4)
    reader = Reader(endpoints)
    reader.wait(20)
    [first, second] = route(endpoints)
    for name in (first, second):
        pods.delete_pod(name)
    reader.more(50)
    assert route(endpoints) == [first, second]
    assert pods.linked(endpoints) == 4
    pods.kill(first)
    reader.more(10)
    pods.launch(first)  # no kubelet would do this; the address is not dialled any more
    eventually("a server listens", lambda: pods.serves(first))
    pods.remove_pod(second)
    reader.check()
    time.sleep(2.5)
    assert peers(endpoints) == set(TWICE) - {first, second}


def test_pod_with_another_identity_is_not_linked(pods: PodSwarm) -> None:
    pods.start_pod("a0", "0:4")
    endpoints = pods.pod_gateway(whole=1)
    pods.start_pod("a0-before", "0:2", address=pods.addresses["a0"], serves=False)
    pods.set_pod_status("a0-before", ready=True)
    eventually(
        "it is refused",
        lambda: "cannot link to a0-before/1: other identity: a0/1/" in pods.log("gateway"),
    )
    pods.set_pod_status("a0-before", phase="Failed")
    assert peers(endpoints) == {"a0"}
    assert whole(endpoints, SHORT) == expected_tokens(SHORT_TOKENS)
    # The replacement has another incarnation: equal address and name are not enough.
    pods.kill("a0")
    pods.kubectl("label", "pod", "a0", "modelswarm.io/incarnation=2", "--overwrite")
    pods.run("a0")  # its Hello still has incarnation 1
    eventually(
        "it is refused",
        lambda: "cannot link to a0/2: other identity: a0/1/" in pods.log("gateway"),
    )
    assert pods.linked(endpoints) == 0


def test_pods_that_are_no_servers_are_ignored(pods: PodSwarm) -> None:
    endpoints = pods.pod_gateway()
    pods.start_pod("odd", "0:4")
    pods.kubectl("label", "pod", "odd", "modelswarm.io/incarnation=first", "--overwrite")
    pods.start_pod("inspector", "0:4")
    pods.kubectl("label", "pod", "inspector", "modelswarm.io/role=inspect", "--overwrite")
    pods.start_pod("good", "0:4")
    eventually("the good one is linked", lambda: "good" in peers(endpoints))
    pods.kill("odd")
    pods.kill("inspector")
    eventually("the others are forgotten", lambda: peers(endpoints) == {"good"})
    pods.run("odd")
    pods.run("inspector")
    time.sleep(1.0)
    assert "inspector" not in peers(endpoints)


# ---- several gateways, several swarms


def test_two_gateways_share_the_pods_of_two_swarms(pods: PodSwarm) -> None:
    pods.start_pods({"a0": "0:2", "a1": "2:4", "a2": "2:4"}, model="alpha")
    pods.start_pods({"b0": "0:4"}, model="beta")
    endpoints = [pods.pod_gateway(name=name) for name in ("gateway-0", "gateway-1")]
    # Not endless: a server has KV for only one such session.
    bodies = [BODY | {"model": name, "max_tokens": 4000} for name in ("alpha", "beta")]
    for each in endpoints:
        eventually("all are linked", partial(sees, each, {"a0", "a1", "a2", "b0"}))
        served = httpx.get(f"{each.url}/v1/models", timeout=10).json()["data"]
        assert {model["id"] for model in served} == {"alpha", "beta"}
    readers = [Reader(each, body=body) for each in endpoints for body in bodies]
    for reader in readers:
        reader.wait(20)
    text = httpx.get(f"http://{pods.addresses['b0']}:7001/metrics", timeout=10).text
    [running] = [
        line for line in text.splitlines() if "server_sessions{" in line and '"running"' in line
    ]
    assert running.endswith(" 2.0"), "both gateways have a session on the same server"
    pods.kill("a2")
    pods.kill("b0")
    pods.run("b0")
    for reader in readers:
        reader.check()


def test_one_gateway_watches_several_namespaces(
    pods: PodSwarm, api: ApiLevel, tmp_path: Path
) -> None:
    with api.namespace() as second, PodSwarm(tmp_path / "second", api, second) as others:
        pods.start_pod("first", "0:4", model="alpha")
        others.start_pod("second", "0:4", model="beta")
        admin = ("--kubernetes", "--kubeconfig", str(api.kubeconfig))
        both = ("--namespace", pods.namespace, "--namespace", second)
        for name, flags in (("named", both), ("every", ())):
            endpoints = pods.gateway(*admin, *flags, name=name)
            eventually("both are linked", partial(sees, endpoints, {"first", "second"}))
        # A namespace without permission does not stop the discovery in others.
        mine = ("--kubernetes", "--kubeconfig", str(pods.make_kubeconfig()))
        endpoints = pods.gateway(*mine, *both, name="partly")
        eventually("its own are linked", lambda: peers(endpoints) == {"first"})


# ---- the API server


def test_requests_are_served_without_the_api_server(own_pods: PodSwarm) -> None:
    pods, api = own_pods, own_pods.api
    pods.start_pods(TWICE)
    endpoints = pods.pod_gateway(whole=4)
    reader = Reader(endpoints)
    reader.wait(20)
    api.stop_apiserver()
    try:
        reader.more(30)
        [first, _] = route(endpoints)
        pods.kill(
            first
        )  # its address is known, so the next process is found without the API server
        pods.launch(first)
        eventually("it is linked again", lambda: pods.linked(endpoints) == 4)
        assert ready(endpoints) == (True, "")
        assert whole(endpoints, SHORT) == expected_tokens(SHORT_TOKENS)
        reader.check()
    finally:
        api.start_apiserver()
    pods.start_pod("c0", "0:4")
    eventually("news come again", lambda: "c0" in peers(endpoints))


def test_changes_during_an_api_outage_are_learned(own_pods: PodSwarm) -> None:
    """The API server restarts without history: it usually refuses the watch, and the pods are listed again."""
    pods, api = own_pods, own_pods.api
    second = api.add_apiserver("second")
    try:
        pods.start_pods({"old": "0:4", "kept": "0:4"})
        endpoints = pods.pod_gateway(whole=2)
        api.stop_apiserver()
        pods.kubectl = Kubectl(
            api.user_kubeconfig("admin", "system:masters", second), pods.namespace
        )
        pods.remove_pod("old")
        pods.start_pod("new", "0:4")
        time.sleep(3.0)
        assert "new" not in peers(endpoints)
    finally:
        api.start_apiserver()
        api.stop_apiserver("second")
        pods.kubectl = api.kubectl.in_namespace(pods.namespace)
    eventually("all is known", lambda: peers(endpoints) == {"new", "kept"})
    assert "keeping the known ones" in pods.log("gateway")


def test_silent_api_server_delays_no_stream(own_pods: PodSwarm) -> None:
    pods, api = own_pods, own_pods.api
    pods.start_pods({"a0": "0:4", "a1": "0:4"})
    endpoints = pods.pod_gateway(whole=2)
    reader = Reader(endpoints)
    reader.wait(20)
    api.pause_apiserver()
    try:
        [used] = route(endpoints)
        pods.kill(used)
        reader.check()
        assert ready(endpoints) == (True, "")
    finally:
        api.resume_apiserver()
    pods.run(used)
    eventually("it is linked again", lambda: pods.linked(endpoints) == 2)


def test_gateway_that_cannot_list_pods_is_not_ready(own_pods: PodSwarm) -> None:
    pods, api = own_pods, own_pods.api
    pods.start_pod("a0", "0:4")
    account = ("--kubernetes", "--kubeconfig", str(pods.make_kubeconfig()))
    forbidden = pods.gateway(*account, "--namespace", "elsewhere", name="forbidden", ready=False)
    found = eventually("the reason is reported", lambda: reason(forbidden, "403"))
    assert "cannot list resource" in found
    assert httpx.get(f"{forbidden.url}/health", timeout=10).status_code == 200
    api.stop_apiserver()
    try:
        here = ("--namespace", pods.namespace)
        early = pods.gateway(*account, *here, name="early", ready=False)
        eventually("it says why", lambda: reason(early, "Cannot connect"))
    finally:
        api.start_apiserver()
    eventually("it is ready", lambda: ready(early) == (True, ""))
    eventually("it is linked", lambda: peers(early) == {"a0"})


def reason(endpoints: Endpoints, part: str) -> str:
    """Return the reason for missing readiness, if it contains `part`."""
    good, text = ready(endpoints)
    assert not good
    return text if part in text else ""


@pytest.mark.soak
def test_random_faults_keep_answers_right(
    own_pods: PodSwarm,
) -> None:
    """Kill, restart and replace random pods for minutes, and kill and pause the API server."""
    seed = int(os.environ.get("SEED", "1"))
    pods, api, rng = own_pods, own_pods.api, random.Random(seed)
    spans = ("0:2", "2:4", "0:4")
    alive = {f"s{n}-0": spans[n % 3] for n in range(6)}
    pods.start_pods(alive)
    endpoints = [pods.pod_gateway(name=f"gateway-{n}", whole=6) for n in range(2)]
    for turn in range(25):
        reader = Reader(rng.choice(endpoints))
        reader.wait(10)
        name = rng.choice(list(alive))
        match rng.randrange(5):
            case 0:
                pods.kill(name)
                pods.run(name)
            case 1:  # replaced, as by the operator
                blocks = alive.pop(name)
                pods.delete_pod(name)
                successor = f"{name.partition('-')[0]}-{turn + 1}"
                pods.start_pod(successor, blocks, incarnation=turn + 2)
                alive[successor] = blocks
                pods.remove_pod(name)
            case 2:
                api.stop_apiserver()
                pods.kill(name)
                pods.launch(name)
                api.start_apiserver()
                pods.wait_serves(name)
            case 3:
                api.pause_apiserver()
                pods.kill(name)
                pods.launch(name)
                eventually("it serves again", partial(pods.serves, name))
                api.resume_apiserver()
        print(f"turn {turn} of seed {seed}")
        reader.check()
    for each in endpoints:
        eventually("it knows whom there is", partial(knows, each, set(alive)))
        assert whole(each, SHORT) == expected_tokens(SHORT_TOKENS)
