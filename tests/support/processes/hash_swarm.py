"""Real server processes with the hash model and a real gateway, for tests of the doors.

Everything is found through the members folder and the announcement, as in a real run; every wait has a deadline.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np
from safetensors.numpy import save_file
from support.models.tokenizers import BYTES_FROM, END, model_files

BLOCKS = 4
CONTEXT = 512
MODEL = "hash"


def model_folder(folder: Path, context: int = CONTEXT, **changes: Any) -> Path:
    """A folder that the hash model takes its outline from and the gateway its tokenizer."""
    config = {
        "num_hidden_layers": BLOCKS,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "vocab_size": BYTES_FROM + 256,
        "tie_word_embeddings": True,
        "eos_token_id": END,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in model_files(config=config, **changes).items():
        (folder / name).write_bytes(content)
    save_file({"model.norm.weight": np.zeros(8, np.float32)}, folder / "model.safetensors")
    return folder


def wait_for(what: str, found: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What `found` gives once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = found()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what}: not within {seconds} seconds")


@dataclass(frozen=True, slots=True)
class Doors:
    """Where a gateway can be reached."""

    http: str
    grpc: str
    metrics: str
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        text = httpx.get(f"http://{self.metrics}/metrics", timeout=10).text
        marks = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name and all(m in line for m in marks)
        )


class HashSwarm:
    """Use as a context manager: on leaving, all of its processes are gone."""

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root = root
        self.members = root / "members"
        self.members.mkdir(parents=True)
        self.folder = model_folder(root / "model", **changes)
        self.found_by: tuple[str, ...] = ("--members", str(self.members))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(10)

    def start(self, name: str, module: str, *flags: str) -> subprocess.Popen[bytes]:
        log = (self.root / f"{name}.log").open("ab")
        command = [sys.executable, "-m", module, *self.found_by, *flags]
        process = subprocess.Popen(
            [*command, "--name", name],
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        log.close()
        self.processes[name] = process
        return process

    def server(self, name: str, blocks: str, *flags: str, model: str = MODEL) -> None:
        source = ("--model", f"file://{self.folder}", "--served-name", model, "--hash-model")
        self.start(name, "modelswarm_serving", "--blocks", blocks, *source, *flags)

    def servers_ready(self, *names: str) -> None:
        for name in names:
            wait_for(f"{name} serves", (self.members / f"{name}.json").exists)

    def member(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.members / f"{name}.json").read_text())
        return content

    def gateway(self, *flags: str, name: str = "gateway", ready: bool = True) -> Doors:
        announced = self.root / f"{name}.json"
        ports = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--metrics", "127.0.0.1:0")
        self.start(name, "modelswarm_gateway", *ports, "--announce", str(announced), *flags)
        wait_for("the gateway is up", announced.exists)
        said = json.loads(announced.read_text())
        doors = Doors(said["http"], said["grpc"], said["metrics"], said["pid"])
        if ready:
            wait_for("the gateway is ready", lambda: self.is_ready(doors))
        return doors

    @staticmethod
    def is_ready(doors: Doors) -> bool:
        return httpx.get(f"{doors.url}/ready", timeout=10).status_code == 200

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(10)

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()


def two_spans(root: Path, *server_flags: str, **changes: Any) -> HashSwarm:
    """Two servers that hold all blocks between them, ready; no gateway yet."""
    swarm = HashSwarm(root, **changes)
    swarm.server("s0", "0:2", *server_flags)
    swarm.server("s1", "2:4", *server_flags)
    swarm.servers_ready("s0", "s1")
    return swarm
