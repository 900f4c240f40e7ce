"""What a Prometheus of a test scrapes, told over HTTP: processes of this machine, or the pods of a cluster.

A file would do too, but watching it takes one of the machine's 128 inotify instances, which kubelets use up. Debian's
Prometheus is built without Kubernetes' service discovery, so `following` looks for pods once a second: those that
carry the annotations `prometheus.io/scrape` and `port`, with the labels that the usual configuration gives them.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
from support.kubernetes.api_client import Json, Plain

from tools.devcluster.control_plane.api_level import ApiLevel

log = logging.getLogger(__name__)
Target = tuple[str, Mapping[str, str]]
"""host:port and labels"""

LOOK_SECONDS = 1.0
LABELS = {
    "component": "app.kubernetes.io/component",
    "swarm": "modelswarm.io/swarm",
    "span": "modelswarm.io/span",
}


class Targets:
    """The list as it is at the moment. Use as a context manager."""

    def __init__(self) -> None:
        self._shown = b"[]"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(outer._shown)))
                self.end_headers()
                self.wfile.write(outer._shown)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                log.debug(format, *args)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self) -> Targets:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def show(self, targets: Sequence[Target]) -> None:
        groups = [{"targets": [target], "labels": labels} for target, labels in targets]
        self._shown = json.dumps(groups).encode()

    def show_local(self, targets: Mapping[str, str]) -> None:
        """Name of a process of this machine -> host:port."""
        self.show([(at, {"namespace": "local", "pod": name}) for name, at in targets.items()])


@contextmanager
def following(level: ApiLevel, targets: Targets, namespaces: Sequence[str] = ()) -> Iterator[None]:
    """Keeps them up to date with the pods; no namespaces: of all."""
    stop = threading.Event()
    with Plain(level) as plain:

        def look() -> None:
            try:
                targets.show(pod_targets(pods_of(plain, namespaces)))
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


def pod_targets(pods: Sequence[Json]) -> list[Target]:
    found: list[Target] = []
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
