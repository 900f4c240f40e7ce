"""A real Prometheus (Debian's package) for tests: started with a configuration, asked questions, stopped.

`scraping(config(targets), folder)` scrapes what `prometheus_targets.py` shows: processes of this machine, or pods.
`check_panels` asks every question of the dashboard, whichever it is. Nothing of it runs after the test.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.kubernetes.prometheus_targets import Targets

START_SECONDS = 30.0
STOP_SECONDS = 10.0
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Series:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Asked:
    """One question of a panel, and what came back."""

    row: str
    panel: str
    expr: str
    series: Sequence[Series]

    @property
    def answered(self) -> bool:
        """A number, not only a division of nothing by nothing."""
        return any(math.isfinite(series.value) for series in self.series)

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
        """What it is now."""
        found = self._ask("query", query=expr)["result"]
        return [Series(each["metric"], float(each["value"][1])) for each in found]

    def number(self, expr: str) -> float:
        """Of an expression that gives one number; 0 if it gives none."""
        found = self.query(expr)
        assert len(found) <= 1, found
        return found[0].value if found else 0.0

    def healthy(self, job: str) -> list[str]:
        """Instances that answered the last time they were asked."""
        active = self._ask("targets", state="active")["activeTargets"]
        return [
            target["labels"]["instance"]
            for target in active
            if target["labels"]["job"] == job and target["health"] == "up"
        ]

    def troubles(self) -> list[str]:
        """What it finds wrong with its targets; that it has none, if so."""
        active = self._ask("targets", state="active")["activeTargets"]
        found = [
            f"{target['labels'].get('pod')} {target['scrapeUrl']}: {target['lastError']}"
            for target in active
            if target["health"] != "up"
        ]
        return found if active else ["no target"]

    def _ask(self, what: str, **parameters: str) -> Json:
        answer = self._client.get(f"/api/v1/{what}", params=parameters)
        said: Json = answer.json()
        assert said["status"] == "success", f"{parameters}: {said.get('error')}"
        data: Json = said["data"]
        return data


def binary(name: str) -> str:
    """`prometheus` or `promtool`; the test is skipped on a machine without them."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install prometheus")
    return found


def lint(shown: bytes) -> str:
    """What promtool says against a page of metrics; nothing if all is well."""
    checked = subprocess.run(
        [binary("promtool"), "check", "metrics"], input=shown, capture_output=True, timeout=30
    )
    return (checked.stdout + checked.stderr).decode()


@contextmanager
def scraping(settings: Json, folder: Path) -> Iterator[Prometheus]:
    """A Prometheus of its own, on a free port of this machine."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "prometheus.yml"
    written.write_text(json.dumps(settings))  # JSON is YAML
    log = folder / "prometheus.log"
    process, address = _start(written, folder, log)
    asked = Prometheus(address)
    try:
        wait_for(asked.is_ready, START_SECONDS, lambda: f"no Prometheus:\n{log.read_text()}")
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
    """Port 0 is any free one; its log says which."""
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

    def told() -> bool:
        assert process.poll() is None, f"Prometheus ended:\n{log.read_text()}"
        for line in log.read_text().splitlines():
            said = json.loads(line) if line.startswith("{") and line.endswith("}") else {}
            if said.get("msg") == "Listening on":
                found.append(said["address"])
        return bool(found)

    wait_for(told, START_SECONDS, lambda: f"Prometheus does not listen:\n{log.read_text()}")
    return found[0]


def config(targets: Targets, every: str = "1s") -> Json:
    """`every`: the interval of scrapes; a process that takes longer to answer counts as down."""
    discovery = [{"url": targets.url, "refresh_interval": "1s"}]
    return {
        "global": {"scrape_interval": every, "scrape_timeout": every},
        "scrape_configs": [{"job_name": "modelswarm", "http_sd_configs": discovery}],
    }


# ---- the dashboard


def check_panels(
    dashboard: Json, prometheus: Prometheus, rows: Collection[str] = (), window: str = "5m"
) -> list[Asked]:
    """Every question of every panel of these rows (none given: of all), as Grafana asks it with all chosen."""
    asked: list[Asked] = []
    row = ""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
        elif not rows or row in rows:
            for target in panel["targets"]:
                expr = filled(target["expr"], window)
                asked.append(Asked(row, panel["title"], expr, prometheus.query(expr)))
    return asked


def summary(asked: Sequence[Asked], prometheus: Prometheus) -> str:
    """In words, for whoever reads the test's output."""
    seconds = prometheus.number("sum(modelswarm_gateway_recovery_seconds_sum)")
    times = prometheus.number("sum(modelswarm_gateway_recovery_seconds_count)")
    reroutes = prometheus.number("sum(modelswarm_gateway_reroutes_total)")
    return (
        f"{len(asked)} questions of {len({(a.row, a.panel) for a in asked})} panels, "
        f"{sum(a.answered for a in asked)} answered with {sum(len(a.series) for a in asked)} series; "
        f"{reroutes:.0f} reroutes, {times:.0f} recoveries of {seconds / max(times, 1):.2f} s on average"
    )


def filled(expr: str, window: str) -> str:
    """With its variables replaced."""
    for name, value in {
        "$__rate_interval": window,
        "$__range": window,
        "$namespace": ".*",
        "$model": ".*",
    }.items():
        expr = expr.replace(name, value)
    assert "$" not in expr, expr
    return expr


def wait_for(condition: Callable[[], bool], seconds: float, problem: Callable[[], str]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(problem())
        time.sleep(0.05)
