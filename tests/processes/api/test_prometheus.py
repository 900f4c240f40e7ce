"""A real Prometheus scrapes a swarm of this machine: every panel has data, a kill is visible, and fires no alert."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.eventually import eventually
from support.kubernetes.alerts import alerts
from support.kubernetes.prometheus import (
    Prometheus,
    Targets,
    check_panels,
    config,
    run_prometheus,
    silent_panels,
)
from support.models.tiny_models import VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.streams import Request
from support.processes.swarm import Running, local_settings, running_swarm

from tools.dashboard.rows import SWARM_ROWS
from tools.make_dashboard import TARGET

ROWS = [row.title for row in SWARM_ROWS]
SEEN_SECONDS = 120.0  # seconds until Prometheus has scraped a new state
CLIENTS, NEW = 4, 600
REROUTES = 'sum(modelswarm_gateway_reroutes_total{cause="link_down"})'
RECOVERIES = "sum(modelswarm_gateway_recovery_seconds_count)"
EVERY = "500ms"  # a server restarts within seconds; one failed scrape must not hide its absence
LEAST = f"min_over_time(min(modelswarm_gateway_coverage)[1m:{EVERY}])"


@pytest.fixture
def swarm(toy_folder: Path) -> Iterator[Running]:
    """Yield 2 spans x 2 servers of the hash model. A restart takes 0.5 s more, so that scrapes see the kill."""
    settings = replace(local_settings("watched", hash_model=True, token_budget=32), restart_limit=4)
    with running_swarm(toy_folder, "watched", spans=2, replicas=2, settings=settings) as running:
        yield running


@pytest.mark.soak
def test_every_dashboard_panel_shows_data_and_a_kill(swarm: Running, tmp_path: Path) -> None:
    with (
        Targets() as targets,
        run_prometheus(config(targets, EVERY), tmp_path / "prometheus") as prometheus,
    ):
        targets.show_local(processes(swarm))
        wait_healthy(prometheus, 5)
        eventually("coverage", lambda: prometheus.number(LEAST) == 2, SEEN_SECONDS)
        with ThreadPoolExecutor(CLIENTS) as clients:
            list(clients.map(lambda seed: swarm.ask(request_of(seed, 40)), range(CLIENTS)))
            assert prometheus.number(REROUTES) == 0
            kill_midway(swarm)
        eventually("a reroute", lambda: prometheus.number(REROUTES) >= 1, SEEN_SECONDS)
        eventually("a recovery", lambda: prometheus.number(RECOVERIES) >= 1, SEEN_SECONDS)
        eventually("less coverage", lambda: prometheus.number(LEAST) == 1, SEEN_SECONDS)
        swarm.wait_whole()
        targets.show_local(processes(swarm))
        wait_healthy(prometheus, 5)
        eventually(
            "full coverage",
            lambda: prometheus.number("min(modelswarm_gateway_coverage)") == 2,
            SEEN_SECONDS,
        )
        check(prometheus)


def request_of(seed: int, new: int) -> Request:
    return Request(prompt_of(100, seed, VOCAB), new)


def kill_midway(swarm: Running) -> None:
    """Kill a server of a stream's route between its tokens; the stream is completed."""
    stream = swarm.start(request_of(7, NEW))
    stream.wait_tokens(50)
    [session] = [session for session in swarm.sessions() if session.route]
    swarm.kill(session.route[1].peer)
    assert len(stream.answer().tokens) == NEW


def check(prometheus: Prometheus) -> None:
    dashboard = json.loads(TARGET.read_text())
    asked = check_panels(dashboard, prometheus, ROWS, window="2m")
    silent = silent_panels(asked)
    assert not silent, "\n".join(silent)
    by_panel = {each.panel: each for each in asked}
    assert by_panel["Streams recovered"].series[0].value > 0
    assert by_panel["Streams failed"].series[0].value == 0
    rules = alerts(installation="local", servers="local")
    true = [rule["alert"] for rule in rules if prometheus.query(rule["expr"])]
    assert true == ["ModelSwarmNoOperatorLeader"]  # no operator runs here


def processes(swarm: Running) -> dict[str, str]:
    servers = {member.name: member.metrics for member in swarm.members()}
    return {"gateway": swarm.local.metrics, **servers}


def wait_healthy(prometheus: Prometheus, count: int) -> None:
    eventually(
        f"{count} scraped targets",
        lambda: len(prometheus.healthy("modelswarm")) == count,
        SEEN_SECONDS,
        prometheus.target_errors,
    )
