"""A namespace with pods that exist only in the API, an operator, and the fault proxy between it and the API server.

Used by the operator's tests at API level. `SharedScene` serves the tests of a module one by one. Every run has these
checks:

- O1: the same end as a clean run; O2: no more pods created than there.
- O3: never two pods for one slot; O4: nothing left.
- O5: a status that never goes back; O6: no write in a settled state; O7: no traceback.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.kubernetes import api_client
from support.kubernetes.api_client import PODS, SWARMS, ApiClient, Json, install_crd
from support.kubernetes.fake_kubelet import FakeKubelet
from support.kubernetes.fault_proxy import Call, FaultProxy
from support.kubernetes.operator_process import ACCOUNT, Operator, grant, shown

from tools.devcluster.control_plane.api_level import ApiLevel
from tools.devcluster.waiting import wait_for

NODES = ("node-a", "node-b")
SETTLED_SECONDS = 180.0
TIMES = {"lastTransitionTime", "notBefore", "lastFailure"}
LEFTOVERS = (
    PODS,
    "/api/v1/namespaces/{}/services",
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
    "/api/v1/namespaces/{}/resourcequotas",
)


def swarm(name: str = "counting", **spec: Any) -> Json:
    """Return a document of two spans with two servers each, unless `spec` says otherwise."""
    return api_client.swarm(name, **{"spans": {"count": 2}, "replicas": 2, **spec})


@dataclass
class Scene:
    level: ApiLevel
    namespace: str
    folder: Path
    client: ApiClient
    kubelet: FakeKubelet
    proxy: FaultProxy
    kubeconfig: Path  # the operator's, through the proxy
    operator: Operator

    def another_operator(self, *flags: str, elect: bool = False, direct: bool = False) -> Operator:
        config = self.account(direct=True) if direct else self.kubeconfig
        return Operator(config, self.namespace, self.folder, *flags, elect=elect)

    def account(self, *, direct: bool = False) -> Path:
        server = "" if direct else self.proxy.url
        return self.level.service_account_kubeconfig(self.namespace, ACCOUNT, server=server)

    def apply(self, document: Json) -> None:
        path, name = SWARMS.format(self.namespace), document["metadata"]["name"]
        if self.client.find(f"{path}/{name}") is None:
            self.client.post(path, document)
        else:
            self.edit(name, **document["spec"])

    def edit(self, name: str = "counting", **spec: Any) -> Json:
        """Merge into the spec, and return the stored object."""
        return self.client.patch(f"{SWARMS.format(self.namespace)}/{name}", {"spec": spec})

    def annotate(self, name: str, **annotations: str | None) -> None:
        marked = {
            f"modelswarm.io/{key.replace('_', '-')}": each for key, each in annotations.items()
        }
        path = f"{SWARMS.format(self.namespace)}/{name}"
        self.client.patch(path, {"metadata": {"annotations": marked}})

    def delete_swarm(self, name: str = "counting", **options: Any) -> None:
        self.client.delete(f"{SWARMS.format(self.namespace)}/{name}", **options)

    def stored_swarm(self, name: str = "counting") -> Json | None:
        return self.client.find(f"{SWARMS.format(self.namespace)}/{name}")

    def status(self, name: str = "counting") -> Json:
        return (self.stored_swarm(name) or {}).get("status") or {}

    def condition(self, kind: str, name: str = "counting") -> Json:
        for each in self.status(name).get("conditions") or ():
            if each["type"] == kind:
                return dict(each)
        return {}

    def pods(self, name: str = "counting") -> list[Json]:
        selector = f"modelswarm.io/swarm={name},modelswarm.io/role=server"
        return self.client.items(PODS.format(self.namespace), labelSelector=selector)

    def live_pods(self, name: str = "counting") -> list[Json]:
        return [pod for pod in self.pods(name) if not pod["metadata"].get("deletionTimestamp")]

    def delete_pod(self, pod: Json | str, **options: Any) -> None:
        name = pod if isinstance(pod, str) else pod["metadata"]["name"]
        self.client.delete(f"{PODS.format(self.namespace)}/{name}", **options)

    def is_settled(self, name: str = "counting", servers: int = 4) -> bool:
        """Say whether the swarm is Ready for its newest generation, with `servers` pods and none terminating."""
        found = self.stored_swarm(name) or {}
        status = found.get("status") or {}
        fresh = status.get("observedGeneration") == found.get("metadata", {}).get("generation")
        states = {each["type"]: each["status"] for each in status.get("conditions") or ()}
        pods = self.pods(name)
        good = states.get("Ready") == "True" and states.get("Progressing") == "False"
        return fresh and good and len(pods) == servers == len(self.live_pods(name))

    def settle(
        self, name: str = "counting", servers: int = 4, seconds: float = SETTLED_SECONDS
    ) -> None:
        wait_for(
            f"{name} to settle with {servers} servers",
            lambda: self.is_settled(name, servers),
            seconds,
            every=0.05,
            explain=lambda: self.explain(name),
        )

    def wait(self, what: str, look: Callable[[], Any], seconds: float = SETTLED_SECONDS) -> Any:
        return wait_for(what, look, seconds, every=0.05, explain=self.explain)

    def wait_gone(self, name: str = "counting", seconds: float = SETTLED_SECONDS) -> None:
        """O4: wait until the swarm and its pods are deleted (Services and budgets: by the garbage collector)."""
        self.wait(
            f"{name} and its pods to go",
            lambda: self.stored_swarm(name) is None and not self.pods(name),
            seconds,
        )

    def explain(self, name: str = "counting") -> str:
        pods = [(pod["metadata"]["name"], pod["status"].get("phase")) for pod in self.pods(name)]
        status, end = self.status(name), self.operator.text()[-5000:]
        return f"{shown(status)}\n{pods}\n{self.kubelet.errors[-3:]}\n{end}"

    def created_pods(self) -> list[str]:
        """O2: return one path per pod that the operator has created through the proxy."""
        # The API server shows a pod before the proxy has the answer to its creation.
        self.wait(
            "answers to creations", lambda: not any(c.is_at_server for c in self._creations())
        )
        return [call.path for call in self._creations() if call.code == 201]

    def _creations(self) -> list[Call]:
        return [
            call for call in self.proxy.calls if call.verb == "POST" and call.path.endswith("/pods")
        ]

    def writes(self) -> list[Call]:
        return [call for call in self.proxy.calls if call.writes]

    def end_state(self, name: str = "counting") -> Json:
        """O1: return the state that two runs must have in common: all but times, versions and incarnations."""
        pods = [
            (
                pod["metadata"]["labels"]["modelswarm.io/slot"],
                pod["metadata"]["annotations"]["modelswarm.io/blocks"],
                pod["metadata"]["annotations"]["modelswarm.io/template-hash"],
            )
            for pod in self.pods(name)
        ]
        root = f"/namespaces/{self.namespace}"
        services = self.client.items(f"/api/v1{root}/services")
        budgets = self.client.items(f"/apis/policy/v1{root}/poddisruptionbudgets")
        return {
            "pods": sorted(pods),
            "status": _without_times(self.status(name)),
            "services": sorted(
                (each["metadata"]["name"], shown(_ports(each))) for each in services
            ),
            "budgets": sorted(
                (each["metadata"]["name"], each["spec"]["minAvailable"]) for each in budgets
            ),
        }

    def check_invariants(self, name: str = "counting") -> None:
        """Check O3, O5 and O7."""
        slots = Counter(
            pod["metadata"]["labels"]["modelswarm.io/slot"] for pod in self.live_pods(name)
        )
        assert all(count == 1 for count in slots.values()), slots
        found = self.stored_swarm(name)
        if found is not None and "status" in found:
            assert found["status"]["observedGeneration"] <= found["metadata"]["generation"]
            for each in found["status"]["conditions"]:
                assert each["status"] in ("True", "False", "Unknown")
                assert each["reason"].isidentifier(), each
                assert each["lastTransitionTime"], each
        self.operator.check_log()

    def wait_quiet(self, seconds: float = 3.0, within: float = SETTLED_SECONDS) -> None:
        """Wait until nothing was written for `seconds`, as writes follow readiness."""
        quiet_since, count = time.monotonic(), len(self.writes())

        def is_quiet() -> bool:
            nonlocal quiet_since, count
            if len(self.writes()) != count:
                quiet_since, count = time.monotonic(), len(self.writes())
            return time.monotonic() - quiet_since >= seconds

        wait_for("no write", is_quiet, within, explain=self.explain)

    def check_quiet(self, seconds: float) -> None:
        """O6: check that nothing is written for `seconds` in which nothing happens."""
        before = len(self.proxy.calls)
        time.sleep(seconds)
        new = [f"{call.verb} {call.path}" for call in self.proxy.calls[before:] if call.writes]
        assert not new, f"{new}\n{self.explain()}"

    def clean(self) -> None:
        """End all faults, and remove all objects of the test from the namespace."""
        self.proxy.fault = lambda call: None
        self.proxy.drops = lambda call, event: False
        self.proxy.rewrite = lambda call, body: body
        self.proxy.frozen.clear()
        self.kubelet.reset()
        for found in self.client.items(SWARMS.format(self.namespace)):
            self.annotate(found["metadata"]["name"], protect=None)
            self.delete_swarm(found["metadata"]["name"])
        self.wait("no swarm", lambda: not self.client.items(SWARMS.format(self.namespace)))
        for path in LEFTOVERS:
            self.client.delete(path.format(self.namespace), gracePeriodSeconds=0)
        self.wait("no pod", lambda: not self.client.items(PODS.format(self.namespace)))
        self.operator.check_log()
        self.operator.forget_log()
        self.proxy.calls.clear()


def _ports(service: Json) -> list[Json]:
    return [{"name": each["name"], "port": each["port"]} for each in service["spec"]["ports"]]


def _without_times(status: Json) -> Json:
    """Leave out times and creation counters."""
    kept = {key: value for key, value in status.items() if key not in ("incarnation", "slots")}
    kept["conditions"] = [
        {key: value for key, value in each.items() if key not in TIMES}
        for each in status.get("conditions", ())
    ]
    kept["spans"] = [
        {**each, "servers": len(each.get("servers", ()))} for each in status.get("spans", ())
    ]
    kept["selector"] = ""  # it contains the uid
    return kept


@contextmanager
def scene(
    level: ApiLevel,
    namespace: str,
    folder: Path,
    *flags: str,
    nodes: tuple[str, ...] = NODES,
    fork: bool = True,
) -> Iterator[Scene]:
    """Yield a scene; the operator is not started yet. Without `nodes`, kwok replaces the fake kubelet."""
    install_crd(level)
    grant(level, namespace)
    own = level.pki.server("fault-proxy", ["localhost"], ["127.0.0.1"])
    with ExitStack() as stack:
        proxy = stack.enter_context(FaultProxy(level.url, level.pki.ca, own))
        client = stack.enter_context(ApiClient(level))
        kubelet = stack.enter_context(FakeKubelet(level, namespace, nodes))
        config = level.service_account_kubeconfig(namespace, ACCOUNT, server=proxy.url)
        operator = Operator(config, namespace, folder, *flags, fork=fork)
        stack.callback(operator.kill)
        yield Scene(level, namespace, folder, client, kubelet, proxy, config, operator)


class SharedScene:
    """One operator in one namespace for all tests of a module; a new one would take two seconds each.

    A scene is not used again if it cannot be cleaned: its test failed, or its operator exited.
    """

    def __init__(
        self, level: ApiLevel, folder: Path, *flags: str, nodes: tuple[str, ...] = NODES
    ) -> None:
        self._level = level
        self._folder = folder
        self._flags = ("--resync", "2", *flags)
        self._nodes = nodes
        self._stack = ExitStack()
        self._scene: Scene | None = None

    def __enter__(self) -> SharedScene:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()

    @contextmanager
    def use(self) -> Iterator[Scene]:
        """Lend the scene to one test, without swarms, pods and faults."""
        current = self._scene or self._open()
        try:
            yield current
            current.clean()
        except BaseException:
            self._drop()
            raise

    def _open(self) -> Scene:
        level, nodes = self._level, self._nodes
        namespace = self._stack.enter_context(level.namespace())
        made = scene(level, namespace, self._folder, *self._flags, nodes=nodes)
        self._scene = opened = self._stack.enter_context(made)
        opened.operator.start().wait_ready()
        return opened

    def _drop(self) -> None:
        self._scene = None
        self._stack.close()
