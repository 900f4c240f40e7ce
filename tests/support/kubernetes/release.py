"""The chart as the quickstart installs it on real nodes: streams through the gateway's Service, their routes, and a
timeline of events.

Used by the tests on real nodes, which share one release, and by the benchmarks of the real cluster. The host reaches
Services and pods, so no port is forwarded. Knows no expectation: `support.processes.oracles` judges the answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise

import grpc
import httpx
from support.kubernetes.api_client import PODS, SWARMS, ApiClient, Json
from support.kubernetes.event_log import PodLog, Watch
from support.kubernetes.quickstart import NAMESPACE
from support.processes.streams import Request, Stream

from modelswarm.client.swarm import SwarmClient, SwarmClientError
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from tools.devcluster.control_plane.kubectl import Kubectl
from tools.devcluster.real import RealCluster
from tools.devcluster.waiting import wait_for

SWARM = "counting"
SERVERS = "modelswarm.io/role=server"
EVENTS = "/api/v1/namespaces/{}/events"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
WHOLE_SECONDS = 240.0
NOTICED_SECONDS = 4.0  # seconds after a fault in which a pause counts as its effect
HTTP, GRPC, METRICS, ADMIN = 8000, 8001, 8002, 8003


class Timeline:
    """Events of a test, with times relative to a moment that is set later."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, str]] = []
        self._lock = threading.Lock()

    def add(self, when: float, words: str) -> None:
        with self._lock:
            self._marks.append((when, words))

    def now(self, words: str) -> float:
        when = time.perf_counter()
        self.add(when, words)
        return when

    def lines_since(self, since: float) -> list[str]:
        with self._lock:
            marks = sorted(mark for mark in self._marks if mark[0] >= since - 0.005)
        return [f"t+{max(0.0, when - since):.2f} {words}" for when, words in marks]


@dataclass(frozen=True, slots=True)
class StreamRoute:
    """The pods that a stream runs through."""

    gateway: str  # pod name
    servers: tuple[str, ...]  # pod names, head first


class Release:
    """The release, its gateways, and the swarm of the quickstart."""

    def __init__(self, cluster: RealCluster, plain: ApiClient, stack: ExitStack) -> None:
        self.cluster = cluster
        self.kubectl: Kubectl = cluster.kubectl.in_namespace(NAMESPACE)
        self.client = plain
        self.timeline = Timeline()
        self.pod_log = PodLog(self.timeline.add)
        self._last_texts: dict[str, str] = {}  # the last text of each condition, and Events by uid
        self._stack = stack
        service = self.kubectl.get("service", "modelswarm-gateway")
        self.address = str(service["spec"]["clusterIP"])
        for path, selector, seen in (
            (PODS, SERVERS, self.pod_log.seen),
            (SWARMS, "", self._swarm_seen),
            (EVENTS, "", self._event_seen),
        ):
            watch = Watch(plain, path.format(NAMESPACE), selector, seen)
            stack.callback(watch.close)

    # ---- the gateways' Service

    @property
    def url(self) -> str:
        return f"http://{self.address}:{HTTP}"

    def serves(self, swarm: str) -> bool:
        """Say whether every gateway serves. Gateways link the last server after the operator reports Ready."""
        for address in self.gateways().values():
            models = httpx.get(f"http://{address}:{HTTP}/v1/models", timeout=60).json()["data"]
            if not any(model["id"] == swarm and model["ready"] for model in models):
                return False
        return True

    # ---- streams

    def stream(self, request: Request) -> Stream:
        """Start a stream through the Service, at any gateway."""
        channel = grpc.insecure_channel(
            f"{self.address}:{GRPC}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        self._stack.callback(channel.close)
        return Stream(api_pb2_grpc.InferenceStub(channel), request)

    def find_route(self, stream: Stream, seconds: float = 180.0) -> StreamRoute:
        """Wait for the route of the only running stream."""

        def look() -> StreamRoute | None:
            assert not stream.done, "the stream ended before its route was known"
            found = [
                StreamRoute(gateway, tuple(name_of(hop.peer) for hop in session.route))
                for gateway, session in self.sessions()
                if session.state == "running" and session.route
            ]
            return found[0] if len(found) == 1 else None

        return wait_for("one running session", look, seconds, every=0.01)

    def sessions(self) -> list[tuple[str, api_pb2.Session]]:
        """Return the sessions of all gateways, each with its gateway's pod."""
        found = []
        for name, address in self.gateways().items():
            with SwarmClient(f"{address}:{ADMIN}") as client:
                try:
                    found += [(name, session) for session in client.fetch_snapshot(2.0).sessions]
                except SwarmClientError:
                    continue  # the gateway has just ended
        return found

    def gateways(self) -> dict[str, str]:
        """Return the running gateway pods and their addresses."""
        selector = "app.kubernetes.io/component=gateway"
        pods = self.client.items(PODS.format(NAMESPACE), labelSelector=selector)
        return {
            pod["metadata"]["name"]: pod["status"]["podIP"]
            for pod in pods
            if pod["status"].get("podIP") and pod["status"]["phase"] == "Running"
        }

    # ---- pods

    def pod(self, name: str) -> Json | None:
        return self.client.find(f"{PODS.format(NAMESPACE)}/{name}")

    def pods(self, swarm: str = "") -> list[Json]:
        """Return the server pods of one swarm, or of all."""
        chosen = f"{SERVERS},modelswarm.io/swarm={swarm}" if swarm else SERVERS
        return self.client.items(PODS.format(NAMESPACE), labelSelector=chosen)

    def node_of(self, name: str) -> str:
        found = self.pod(name)
        assert found is not None, f"no pod {name}"
        return str(found["spec"]["nodeName"])

    def delete_pod(self, name: str, *, force: bool = False) -> float:
        """Delete a pod as `kubectl delete pod` (`--force`) does, and return the time of the request."""
        when = self.timeline.now(f"pod {name} is deleted{' by force' if force else ''}")
        options = {"gracePeriodSeconds": 0} if force else {}
        self.client.delete(f"{PODS.format(NAMESPACE)}/{name}", **options)
        return when

    # ---- the operator

    def leader(self) -> str:
        """Return the identity of the leading operator: pod name, "_", a random part; "" without a leader."""
        (lease,) = self.client.items(LEASES.format(NAMESPACE))
        return str(lease["spec"].get("holderIdentity") or "")

    # ---- the swarm

    def swarm(self) -> Json:
        return self.client.get(f"{SWARMS.format(NAMESPACE)}/{SWARM}")

    def conditions(self) -> dict[str, Json]:
        conditions = self.swarm().get("status", {}).get("conditions", ())
        return {each["type"]: each for each in conditions}

    def is_whole(self, servers: int = 4) -> bool:
        """Say whether the swarm is Ready and settled, and every gateway is linked to exactly its servers."""
        states = {kind: each["status"] for kind, each in self.conditions().items()}
        if states.get("Ready") != "True" or states.get("Progressing") != "False":
            return False
        names = {pod["metadata"]["name"] for pod in self.pods()}
        return len(names) == servers and all(
            self._linked(address) == names for address in self.gateways().values()
        )

    def _linked(self, address: str) -> set[str]:
        with SwarmClient(f"{address}:{ADMIN}") as client:
            try:
                return {name_of(server.peer) for server in client.fetch_snapshot(2.0).servers}
            except SwarmClientError:
                return set()

    def wait_whole(self, servers: int = 4, seconds: float = WHOLE_SECONDS) -> None:
        wait_for(
            f"{servers} servers, all of them ready and linked",
            lambda: self.is_whole(servers),
            seconds,
            every=0.25,
            explain=self.explain,
        )

    def wait(self, what: str, look: Callable[[], object], seconds: float) -> None:
        wait_for(what, look, seconds, every=0.1, explain=self.explain)

    def explain(self) -> str:
        pods = self.kubectl("get", "pods", "-o", "wide")
        events = self.kubectl("events", "--for", f"modelswarm/{SWARM}")
        return f"{pods}\n{events[-3000:]}\n{self.conditions()}"

    def events(self) -> list[str]:
        """Return the reasons of the swarm's Events, oldest first."""
        field = "involvedObject.kind=ModelSwarm"
        found = self.client.items(EVENTS.format(NAMESPACE), fieldSelector=field)
        return [each["reason"] for each in found]

    def _swarm_seen(self, when: float, kind: str, swarm: Json) -> None:
        for each in (swarm.get("status") or {}).get("conditions") or ():
            words = f"{each['type']}={each['status']} ({each['reason']}: {each['message']})"
            if kind != "DELETED" and self._last_texts.get(each["type"]) != words:
                self._last_texts[each["type"]] = words
                self.timeline.add(when, f"condition {words}")

    def _event_seen(self, when: float, kind: str, event: Json) -> None:
        uid = event["metadata"]["uid"]  # a restarted watch repeats all of them
        if event["involvedObject"]["kind"] == "ModelSwarm" and uid not in self._last_texts:
            self._last_texts[uid] = kind
            self.timeline.add(when, f"Event {event['reason']}: {event['message']}")


@contextmanager
def open_release(cluster: RealCluster) -> Iterator[Release]:
    """Watch the release that the quickstart's block `install` has made."""
    with ApiClient(cluster.api) as plain, ExitStack() as stack:
        yield Release(cluster, plain, stack)


def pause_after(stream: Stream, fault: float) -> tuple[float, float]:
    """Return the longest pause that began within `NOTICED_SECONDS` of the fault, and its end.

    A pause that began before the fault counts from the fault.
    """
    gaps = [
        (b - max(a, fault), b)
        for a, b in pairwise(stream.times)
        if b > fault and a < fault + NOTICED_SECONDS
    ]
    assert gaps, "no token came after the fault"
    return max(gaps)
