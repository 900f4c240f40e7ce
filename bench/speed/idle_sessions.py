"""Memory of a gateway for 2,000 idle sessions, and their cost while nothing happens.

Real processes: two servers of the hash model, and a gateway that keeps all sessions.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from support.processes.swarm import MODEL, Endpoints, two_spans

from bench.harness import Bar, Result
from bench.speed.gateway_process import cpu_seconds, resident_mb

SESSIONS, PROMPT, ANSWER = 2000, 200, 8
CLIENTS = 8
IDLE_SECONDS = 10.0
WARM_SESSIONS = 20
SERVER_FLAGS = ("--pages", str(2 * SESSIONS * (PROMPT + ANSWER) // 16))
GATEWAY_FLAGS = ("--max-named-sessions", str(2 * SESSIONS), "--session-idle", "3600")


def run() -> Result:
    with tempfile.TemporaryDirectory() as folder, two_spans(Path(folder), *SERVER_FLAGS) as swarm:
        gateway = swarm.gateway(*GATEWAY_FLAGS)
        _open_sessions(gateway, 0, WARM_SESSIONS)
        before, busy_before = resident_mb(gateway.pid), _busy_fraction(gateway)
        _open_sessions(gateway, WARM_SESSIONS, WARM_SESSIONS + SESSIONS)
        total = resident_mb(gateway.pid)
        busy = _busy_fraction(gateway)
    figures = {
        "mb": total - before,
        "total_mb": total,
        "cpu_fraction": busy,
        "cpu_fraction_without": busy_before,
        "load": os.getloadavg()[0],
    }
    return Result(
        name="idle_sessions",
        figures=figures,
        columns=("what", "figure"),
        rows=[
            (f"MB for {SESSIONS} idle sessions", f"{figures['mb']:.1f}"),
            ("MB of the gateway in all", f"{total:.1f}"),
            ("share of a core that the idle gateway uses", f"{busy:.4f}"),
            (f"the same with {WARM_SESSIONS} sessions", f"{busy_before:.4f}"),
        ],
        shape=f"two servers of the hash model, {PROMPT + ANSWER} tokens per session, load {figures['load']:.1f}",
        threads=1,
        bars=[Bar("mb", "<=", 100.0)],
    )


def _busy_fraction(gateway: Endpoints) -> float:
    """Return the share of a core that the gateway uses while nothing happens."""
    spent = cpu_seconds(gateway.pid)
    time.sleep(IDLE_SECONDS)
    return (cpu_seconds(gateway.pid) - spent) / IDLE_SECONDS


def _open_sessions(gateway: Endpoints, first: int, last: int) -> None:
    with httpx.Client(base_url=gateway.url, timeout=120) as client:

        def turn(number: int) -> None:
            body = {
                "model": MODEL,
                "prompt": [10 + (number + place) % 200 for place in range(PROMPT)],
                "max_tokens": ANSWER,
                "ignore_eos": True,
                "session_id": f"idle-{number}",
            }
            client.post("/v1/completions", json=body).raise_for_status()

        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(turn, range(first, last)))
