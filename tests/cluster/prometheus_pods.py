"""Which pods a Prometheus scrapes: those that carry the annotations `prometheus.io/scrape` and `prometheus.io/port`.

Debian's Prometheus is built without Kubernetes' service discovery, so a thread looks for pods once a second and writes
them to the file that it reads, with the labels that the usual scrape configuration gives them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cluster.kube.api_level import ApiLevel
from cluster.plain import Json, Plain
from cluster.prometheus import write_groups

LOOK_SECONDS = 1.0
STOP_SECONDS = 10.0
LABELS = {
    "component": "app.kubernetes.io/component",
    "swarm": "modelswarm.io/swarm",
    "span": "modelswarm.io/span",
}


@contextmanager
def following(level: ApiLevel, targets: Path, namespaces: Sequence[str] = ()) -> Iterator[None]:
    """Keeps the file up to date; no namespaces: all."""
    stop, failures = threading.Event(), list[Exception]()

    def look() -> None:
        try:
            with Plain(level) as plain:
                while not stop.wait(LOOK_SECONDS):
                    write_groups(targets, pod_targets(pods_of(plain, namespaces)))
        except Exception as error:  # said where the test ends, not in a thread
            failures.append(error)

    write_groups(targets, ())
    thread = threading.Thread(target=look, name="targets", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(STOP_SECONDS)
    assert not failures, failures


def pods_of(plain: Plain, namespaces: Sequence[str]) -> list[Json]:
    paths = [f"/api/v1/namespaces/{name}/pods" for name in namespaces] or ["/api/v1/pods"]
    return [pod for path in paths for pod in plain.items(path)]


def pod_targets(pods: Sequence[Json]) -> list[tuple[str, Mapping[str, str]]]:
    found: list[tuple[str, Mapping[str, str]]] = []
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status", {})
        said = meta.get("annotations", {})
        address, port = status.get("podIP"), said.get("prometheus.io/port")
        if said.get("prometheus.io/scrape") != "true" or status.get("phase") != "Running":
            continue
        if address and port:
            found.append((f"{address}:{port}", _labels(meta)))
    return found


def _labels(meta: Json) -> Mapping[str, str]:
    own: Mapping[str, str] = meta.get("labels", {})
    named = {name: own[label] for name, label in LABELS.items() if label in own}
    return {"namespace": meta["namespace"], "pod": meta["name"], **named}
