"""Store of the servers' pods: the last known state of each, and the endpoints of those that can be dialled.

Fed by the reflectors (`pod_reflector.py`), read by `kubernetes_source.py`. A pod is dialled by its name and its
incarnation, which are known beforehand. The answering server tells its boot nonce; a pod that got another pod's IP is
refused by its identity. A terminating pod is not dialled any more, and keeps its link. Pure: no API, no clock.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.link.hello_checks import MODEL
from modelswarm.resources.labels import INCARNATION, LINKS, LINKS_PORT, ROLE, SERVED_NAME, SERVER
from modelswarm_gateway.discovery.dialer import Endpoint

log = logging.getLogger(__name__)

SELECTOR = f"{ROLE}={SERVER}"


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Metadata(_Part):
    name: str
    uid: str
    namespace: str = ""
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    deletionTimestamp: str | None = None


class _Port(_Part):
    containerPort: int
    name: str = ""


class _Container(_Part):
    ports: list[_Port] = []


class _Spec(_Part):
    containers: list[_Container] = []


class _Running(_Part):
    restartCount: int = 0
    ready: bool = False
    containerID: str = ""


class _Status(_Part):
    phase: str = ""
    podIP: str = ""
    containerStatuses: list[_Running] = []


class _PodObject(_Part):
    """The part of a Pod that is needed to dial it."""

    metadata: _Metadata
    spec: _Spec = Field(default_factory=_Spec)
    status: _Status = Field(default_factory=_Status)


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str
    uid: str
    incarnation: int
    model: str  # "": not annotated
    ip: str  # "": not assigned yet
    port: int
    phase: str
    terminating: bool
    change_token: str

    @property
    def peer(self) -> PeerId:
        """Id of the pod's server without its boot nonce, as `identity.pod_of` returns it."""
        return f"{self.name}/{self.incarnation}"

    @property
    def state(self) -> str:
        return "Terminating" if self.terminating else self.phase

    @property
    def is_dialable(self) -> bool:
        return self.state == "Running" and self.ip != ""

    @property
    def endpoint(self) -> Endpoint:
        host = f"[{self.ip}]" if ":" in self.ip else self.ip
        return Endpoint(Address(self.peer, f"{host}:{self.port}"), self.change_token)


def parse_pod(content: object) -> Pod:
    """Parse a pod. Raise ValueError if it is not the pod of a server."""
    found = _PodObject.model_validate(content)
    incarnation = found.metadata.labels.get(INCARNATION, "")
    if not (incarnation.isascii() and incarnation.isdigit()):
        raise ValueError(f"its label {INCARNATION} is {incarnation!r}, not a number")
    ports = [port for c in found.spec.containers for port in c.ports if port.name == LINKS]
    status, containers = found.status, found.status.containerStatuses
    model = found.metadata.annotations.get(SERVED_NAME, "")  # of 256 KiB, if its author likes
    return Pod(
        namespace=found.metadata.namespace,
        name=found.metadata.name,
        uid=found.metadata.uid,
        incarnation=int(incarnation),
        model=model if MODEL.fullmatch(model) else "",
        ip=status.podIP,
        port=ports[0].containerPort if ports else LINKS_PORT,
        phase=status.phase,
        terminating=found.metadata.deletionTimestamp is not None,
        change_token=" ".join(f"{c.containerID}/{c.restartCount}/{c.ready}" for c in containers),
    )


class PodStore:
    """All pods, by the scope of their reflector: a namespace, or "" for all namespaces."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, Pod]] = {}
        self._endpoints: dict[PeerId, Endpoint] | None = None  # None: out of date
        self._duplicates: set[PeerId] = set()

    def replace_scope(self, scope: str, contents: Iterable[object]) -> None:
        """Replace all pods of a scope by those of a list."""
        pods: dict[str, Pod] = {}
        for content in contents:
            pod = _parse_or_warn(content)
            if pod is not None:
                pods[pod.uid] = pod
        self._scopes[scope] = pods
        self._endpoints = None

    def apply_event(self, scope: str, kind: str, content: object) -> None:
        """Apply a watch event: ADDED, MODIFIED or DELETED."""
        pod = _parse_or_warn(content)
        if pod is None:
            return
        self._endpoints = None
        pods = self._scopes.setdefault(scope, {})
        if kind == "DELETED":
            pods.pop(pod.uid, None)
        else:
            pods[pod.uid] = pod

    def endpoints(self) -> Mapping[PeerId, Endpoint]:
        if self._endpoints is None:
            self._endpoints = self._build_endpoints()
        return self._endpoints

    def expected_models(self) -> frozenset[str]:
        """Return the models that the pods serve, or will serve once they are ready."""
        return frozenset(pod.model for pod in self._all_pods() if pod.model)

    def pod_states(self) -> Mapping[str, int]:
        """Return the number of pods in each state."""
        return Counter(pod.state for pod in self._all_pods())

    def _all_pods(self) -> Iterable[Pod]:
        return (pod for pods in self._scopes.values() for pod in pods.values())

    def _build_endpoints(self) -> dict[PeerId, Endpoint]:
        endpoints: dict[PeerId, Endpoint] = {}
        for pod in self._all_pods():
            if pod.is_dialable and endpoints.setdefault(pod.peer, pod.endpoint) != pod.endpoint:
                self._warn_duplicate(pod)
        return endpoints

    def _warn_duplicate(self, pod: Pod) -> None:
        if pod.peer not in self._duplicates:
            self._duplicates.add(pod.peer)
            log.warning(
                "two pods have the name %s and one incarnation: %s", pod.name, pod.namespace
            )


def _parse_or_warn(content: object) -> Pod | None:
    try:
        return parse_pod(content)
    except ValidationError as error:
        log.warning("ignored an object that is not a Pod: %s", str(error).splitlines()[0])
    except ValueError as error:
        log.warning("ignored a pod that is not a server's: %s", error)
    return None
