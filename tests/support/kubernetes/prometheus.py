"""A real Prometheus (Debian's package) for tests: started with a configuration, queried, stopped.

`scraping(config(targets), folder)` scrapes the `Targets` over HTTP: processes of this machine, or pods. Watching a
file instead would take one of the machine's 128 inotify instances, which kubelets use up. Debian's Prometheus has no
service discovery for Kubernetes, so `follow_pods` lists the pods once a second. It takes those with the annotations
`prometheus.io/scrape` and `port`, with the labels of the usual configuration. `check_panels` runs every query of the
dashboard.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
from support.eventually import eventually
from support.kubernetes.api_client import ApiClient, Json
from support.kubernetes.requirements import require
from typing_extensions import override

from tools.devcluster.control_plane.api_level import ApiLevel

log = logging.getLogger(__name__)
Target = tuple[str, Mapping[str, str]]
"""host:port and labels"""

START_SECONDS = 120.0
STOP_SECONDS = 60.0
LOOK_SECONDS = 1.0
PASSES = "Part of a pass"  # the panel of forward and backward passes
LABELS = {
    "component": "app.kubernetes.io/component",
    "swarm": "modelswarm.io/swarm",
    "span": "modelswarm.io/span",
}


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel, and its result."""

    row: str
    panel: str
    expr: str
    series: Sequence[Series]

    @property
    def answered(self) -> bool:
        """Say whether the result has a number other than NaN, which is 0 divided by 0."""
        return any(math.isfinite(series.value) for series in self.series)

    @override
    def __str__(self) -> str:
        return f"{self.row} / {self.panel}: {self.expr} gave {[s.value for s in self.series]}"


class Prometheus:
    def __init__(self, address: str) -> None:
        self._client = httpx.Client(base_url=f"http://{address}", timeout=30)

    def close(self) -> None:
        self._client.close()

    def is_ready(self) -> bool:
        try:
            return self._client.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def query(self, expr: str) -> list[Series]:
        """Run an instant query."""
        found = self._ask("query", query=expr)["result"]
        return [Series(each["metric"], float(each["value"][1])) for each in found]

    def number(self, expr: str) -> float:
        """Return the value of an expression with at most one series; 0 without series."""
        found = self.query(expr)
        assert len(found) <= 1, found
        return found[0].value if found else 0.0

    def healthy(self, job: str) -> list[str]:
        """Return the instances whose last scrape succeeded."""
        active = self._ask("targets", state="active")["activeTargets"]
        return [
            target["labels"]["instance"]
            for target in active
            if target["labels"]["job"] == job and target["health"] == "up"
        ]

    def target_errors(self) -> list[str]:
        """Return the errors of failed scrapes, or the lack of targets."""
        active = self._ask("targets", state="active")["activeTargets"]
        found = [
            f"{target['labels'].get('pod')} {target['scrapeUrl']}: {target['lastError']}"
            for target in active
            if target["health"] != "up"
        ]
        return found if active else ["no target"]

    def _ask(self, what: str, **parameters: str) -> Json:
        answer = self._client.get(f"/api/v1/{what}", params=parameters)
        document: Json = answer.json()
        assert document["status"] == "success", f"{parameters}: {document.get('error')}"
        data: Json = document["data"]
        return data


def binary(name: str) -> str:
    """Return the path of `prometheus` or `promtool`; a machine may lack them."""
    found = shutil.which(name)
    if found is None:
        require([f"{name} is not installed (apt-get install prometheus)"])
    return found or name


def promtool_fault(*arguments: str) -> str:
    """Run promtool; return what it prints if it fails, else an empty text."""
    ran = subprocess.run(
        [binary("promtool"), *arguments], capture_output=True, text=True, timeout=60
    )
    return ran.stdout + ran.stderr + f"exit code {ran.returncode}" if ran.returncode else ""


def lint(shown: bytes) -> str:
    """Return promtool's objections to a page of metrics, or an empty text."""
    checked = subprocess.run(
        [binary("promtool"), "check", "metrics"], input=shown, capture_output=True, timeout=60
    )
    return (checked.stdout + checked.stderr).decode()


@contextmanager
def run_prometheus(settings: Json, folder: Path) -> Iterator[Prometheus]:
    """Run a Prometheus on a free port of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "prometheus.yml"
    written.write_text(json.dumps(settings))  # JSON is YAML
    log = folder / "prometheus.log"
    process, address = _start(written, folder, log)
    asked = Prometheus(address)
    try:
        eventually("a ready Prometheus", asked.is_ready, START_SECONDS, log.read_text)
        yield asked
    finally:
        asked.close()
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_SECONDS)


def _start(config: Path, folder: Path, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start it with port 0, and read the chosen port from its log."""
    command = [
        binary("prometheus"),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=json",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=folder)
    try:
        return process, _address(process, log)
    except BaseException:
        process.kill()
        process.wait(STOP_SECONDS)
        raise


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    found: list[str] = []

    def has_address() -> bool:
        assert process.poll() is None, f"Prometheus ended:\n{log.read_text()}"
        for line in log.read_text().splitlines():
            event = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if event.get("msg") == "Listening on":
                found.append(event["address"])
        return bool(found)

    eventually("the address of Prometheus", has_address, START_SECONDS, log.read_text)
    return found[0]


class Targets:
    """The current list of targets, served over HTTP while the context is open."""

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

            @override
            def log_message(self, format: str, *args: object) -> None:
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
        """Show processes of this machine: name -> host:port."""
        self.show([(at, {"namespace": "local", "pod": name}) for name, at in targets.items()])


@contextmanager
def follow_pods(
    level: ApiLevel, targets: Targets, namespaces: Sequence[str] = ()
) -> Iterator[None]:
    """Keep the targets equal to the pods of these namespaces, or of all namespaces."""
    stop = threading.Event()
    with ApiClient(level) as plain:

        def look() -> None:
            try:
                targets.show(pod_targets(pods_of(plain, namespaces)))
            except httpx.HTTPError as error:  # the API server may be down: the targets stay
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


def pods_of(plain: ApiClient, namespaces: Sequence[str]) -> list[Json]:
    paths = [f"/api/v1/namespaces/{name}/pods" for name in namespaces] or ["/api/v1/pods"]
    return [pod for path in paths for pod in plain.items(path)]


def pod_targets(pods: Sequence[Json]) -> list[Target]:
    found: list[Target] = []
    for pod in pods:
        meta, status = pod["metadata"], pod.get("status", {})
        annotations = meta.get("annotations", {})
        address, port = status.get("podIP"), annotations.get("prometheus.io/port")
        if annotations.get("prometheus.io/scrape") != "true" or status.get("phase") != "Running":
            continue
        if address and port:
            found.append((f"{address}:{port}", _labels(meta)))
    return found


def _labels(meta: Json) -> Mapping[str, str]:
    own: Mapping[str, str] = meta.get("labels", {})
    named = {name: own[label] for name, label in LABELS.items() if label in own}
    return {"namespace": meta["namespace"], "pod": meta["name"], **named}


def config(targets: Targets, every: str = "1s") -> Json:
    """Return a configuration. A scrape that takes longer than `every`, the interval, counts as failed."""
    discovery = [{"url": targets.url, "refresh_interval": "1s"}]
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every},
        "scrape_configs": [{"job_name": "modelswarm", "http_sd_configs": discovery}],
    }


# ---- the dashboard


def check_panels(
    dashboard: Json, prometheus: Prometheus, rows: Collection[str] = (), window: str = "5m"
) -> list[PanelQuery]:
    """Run every query of every panel of these rows, or of all, as Grafana does with all variables chosen."""
    asked: list[PanelQuery] = []
    row = ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif not rows or row in rows:
            for target in panel["targets"]:
                expr = fill_variables(target["expr"], window)
                asked.append(PanelQuery(row, panel["title"], expr, prometheus.query(expr)))
    return asked


def silent_panels(asked: Sequence[PanelQuery]) -> list[str]:
    """Return the queries without a number, but those of passes: no server of these swarms has memory for them."""
    return [str(each) for each in asked if not each.answered and each.panel != PASSES]


def summary(asked: Sequence[PanelQuery], prometheus: Prometheus) -> str:
    """Return a line for the test's output."""
    seconds = prometheus.number("sum(modelswarm_gateway_recovery_seconds_sum)")
    times = prometheus.number("sum(modelswarm_gateway_recovery_seconds_count)")
    reroutes = prometheus.number("sum(modelswarm_gateway_reroutes_total)")
    return (
        f"{len(asked)} questions of {len({(a.row, a.panel) for a in asked})} panels, "
        f"{sum(a.answered for a in asked)} answered with {sum(len(a.series) for a in asked)} series; "
        f"{reroutes:.0f} reroutes, {times:.0f} recoveries of {seconds / max(times, 1):.2f} s on average"
    )


def fill_variables(expr: str, window: str) -> str:
    """Return the expression with its dashboard variables replaced."""
    for name, value in {
        "$__rate_interval": window,
        "$__range": window,
        "$installation": ".*",
        "$namespace": ".*",
        "$model": ".*",
    }.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr
