"""`modelswarm ui` as a process, beside a published swarm of this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx

from modelswarm.cli.demo.example import load_example
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm

STOP_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Page:
    url: str  # with the token

    @property
    def base(self) -> str:
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}"

    @property
    def token(self) -> str:
        return parse_qs(urlsplit(self.url).query)["token"][0]

    def headers(self, **more: str) -> dict[str, str]:
        return {"X-ModelSwarm-Token": self.token} | more

    def post(self, path: str, body: Any = None, **headers: str) -> httpx.Response:
        sent = self.headers(**{name.replace("_", "-"): value for name, value in headers.items()})
        return httpx.post(f"{self.base}{path}", json=body or {}, headers=sent, timeout=60)

    def first_snapshot(self) -> dict[str, Any]:
        with httpx.stream(
            "GET", f"{self.base}/api/snapshots", headers=self.headers(), timeout=60
        ) as answer:
            assert answer.status_code == 200
            line = next(line for line in answer.iter_lines() if line.startswith("data: "))
        found: dict[str, Any] = json.loads(line.removeprefix("data: "))
        return found


@contextmanager
def open_page(*arguments: str) -> Iterator[Page]:
    """Run `modelswarm ui` with these arguments; it must end by SIGINT with exit code 0."""
    command = (sys.executable, "-m", "modelswarm.cli", "ui", "--json", *arguments)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield Page(json.loads(process.stdout.readline())["url"])
        process.send_signal(2)
        assert process.wait(STOP_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def example_swarm(runtime: Path, *, hash_model: bool) -> Iterator[LocalSwarm]:
    """Yield the example, two spans with two servers each, as `modelswarm up` publishes it in `runtime`."""
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(runtime)
    try:
        with LocalSwarm(
            plan_document(load_example()), LocalSettings(hash_model=hash_model)
        ) as made:
            yield made
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before
