"""Which pods a Prometheus scrapes: those that carry the annotations `prometheus.io/scrape` and `prometheus.io/port`.

Debian's Prometheus is built without Kubernetes' service discovery, so a thread looks for pods once a second and writes
them to the file that it reads, with the labels that the usual scrape configuration gives them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from cluster.kube.api_level import ApiLevel
from cluster.plain import Json, Plain
from cluster.prometheus import write_groups

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
LABELS = {
    "component": "app.kubernetes.io/component",
    "swarm": "modelswarm.io/swarm",
    "span": "modelswarm.io/span",
}


@contextmanager
def following(level: ApiLevel, targets: Path, namespaces: Sequence[str] = ()) -> Iterator[None]:
    """Keeps the file up to date; no namespaces: all."""
    stop = threading.Event()
    with Plain(level) as plain:

        def look() -> None:
            try:
                write_groups(targets, pod_targets(pods_of(plain, namespaces)))
            except httpx.HTTPError as error:  # the API server may be away: what is known stays
                log.warning("pods cannot be listed: %s", error)

        def keep_looking() -> None:
            while not stop.wait(LOOK_SECONDS):
                look()

        look()
        thread = threading.Thread(target=keep_looking, name="targets", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


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
