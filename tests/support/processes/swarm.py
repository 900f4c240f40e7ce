"""Swarms of real processes on this machine, with streams, kills and metrics.

`Running` is a `LocalSwarm`, the product's own class that `up` uses. `HashSwarm` starts each server and gateway on its
own, for tests with unusual processes. Used by tests of processes and of chaos. `oracles.py` knows the correct tokens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import httpx
import numpy as np
from safetensors.numpy import save_file
from support.eventually import SECONDS, eventually
from support.models.tokenizers import BYTES_FROM, END, model_files
from support.processes.forked_process import ForkedProcess, fork_process
from support.processes.streams import ANSWER_SECONDS, TOY_MODEL, Answer, Request, Stream

from modelswarm.client.swarm import SwarmClient, SwarmClientError
from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.local.swarm import LocalSwarm
from modelswarm.placement.plan import PAGE_SIZE, SwarmPlan
from modelswarm.process.run_files import ServerFile
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm.resources.loading import parse_document
from modelswarm.resources.spec import ModelSwarm

# Defaults of a `HashSwarm`.
BLOCKS, CONTEXT, MODEL, VOCABULARY = 4, 512, "hash", BYTES_FROM + 256
ENDLESS = 100_000  # positions: a context so long that no answer ends before its test
READY_SECONDS = 300.0  # seconds for processes to start on a busy machine
EMPTY_SECONDS = 120.0  # seconds until the pages of ended sessions are free
PAGES = "modelswarm_server_kv_pages"
COUNTED_SECONDS = 0.15  # seconds after which a server's metrics include everything counted before
PATIENT = ("--suspect-after", "20", "--fence-timeout", "30")
"""Flags of a gateway in tests that are not about silence. A server without a processor for seconds is no fault there,
and recoveries are counted exactly.
"""
BRIEF_HOLD = ("--hold-limit", "3", "--suspect-after", "2", "--fence-timeout", "3")
"""The same flags for tests that wait for a hold to end."""
HASH = LocalSettings(hash_model=True, publish=False, flags={GATEWAY_JOB: PATIENT})


@dataclass(frozen=True, slots=True)
class Faults:
    """Counters of the gateway at one moment."""

    reroutes: int  # faults that sent a running session into the recovery loop
    resumed: int  # sessions that had a fault and reached their next token


class Running:
    """One swarm with its endpoints."""

    def __init__(self, local: LocalSwarm) -> None:
        self.local = local
        self.view = SwarmClient(local.admin)
        self._channel = grpc.insecure_channel(local.grpc)
        self._stub = api_pb2_grpc.InferenceStub(self._channel)
        self._calm: dict[Request, Answer] = {}

    def close(self) -> None:
        self._channel.close()
        self.view.__exit__(None, None, None)

    # ---- streams

    def start(self, request: Request) -> Stream:
        return Stream(self._stub, request)

    def ask(self, request: Request) -> Answer:
        return self.start(request).answer()

    def ask_all(self, requests: Sequence[Request]) -> list[Answer]:
        """Run all requests at once; return their answers."""
        return [stream.answer() for stream in [self.start(request) for request in requests]]

    def calm(self, request: Request) -> Answer:
        """Return the answer without a kill. Each is requested only once."""
        if request not in self._calm:
            self.wait_whole()
            before = self.faults()
            self._calm[request] = self.ask(request)
            assert self.faults() == before, "the undisturbed run was disturbed"
        return self._calm[request]

    # ---- state

    def sessions(self) -> list[api_pb2.Session]:
        return list(self.view.fetch_snapshot().sessions)

    def only_session(self) -> api_pb2.Session:
        found = self.sessions()
        assert len(found) == 1, found
        return found[0]

    def wait_session(self, suits: Callable[[api_pb2.Session], bool]) -> api_pb2.Session:
        """Wait for a session that suits, and return it."""
        found = eventually(
            "a session looks as wanted",
            lambda: [session for session in self.sessions() if suits(session)],
            ANSWER_SECONDS,
            self.sessions,
        )
        return found[0]

    def faults(self) -> Faults:
        values = metrics(self.local.metrics)
        return Faults(
            reroutes=int(total(values, "modelswarm_gateway_reroutes_total")),
            resumed=int(total(values, "modelswarm_gateway_recoveries_total", 'outcome="resumed"')),
        )

    def ejections(self, cause: str) -> int:
        """Return the number of ejections of servers for this cause."""
        values = metrics(self.local.metrics)
        return int(total(values, "modelswarm_gateway_ejections_total", f'cause="{cause}"'))

    def members(self) -> list[ServerFile]:
        return [server.member for server in self.local.servers if server.member is not None]

    def rows(self, name: str = "") -> dict[str, int]:
        """Return the number of rows that each server, or the named one, has run through its blocks."""
        return {
            member.name: int(total(metrics(member.metrics), "modelswarm_server_rows_total"))
            for member in self.members()
            if name in ("", member.name)
        }

    def pages_in_use(self) -> dict[str, int]:
        """Return the used pages by server. Servers that use none are left out; those without the metric yet are not."""
        used = {}
        for member in self.members():
            values = metrics(member.metrics)
            every = total(values, PAGES)
            given = every - total(values, PAGES, 'state="free"')
            if given or every == 0:
                used[member.name] = int(given)
        return used

    # ---- kills

    def kill(self, peer: str) -> None:
        """Send SIGKILL. The supervisor restarts the server."""
        name = name_of(peer)
        alive = {member.peer for member in self.members()}
        assert peer in alive, f"{peer} is not alive"
        self.local.kill(name)

    def wait_whole(self) -> None:
        """Wait until every server is ready and the gateway is linked to exactly these."""

        def whole() -> bool:
            try:
                linked = {server.peer for server in self.view.fetch_snapshot().servers}
            except SwarmClientError:
                return (
                    False  # the gateway was killed, too, and its channel is not yet connected again
                )
            alive = {member.peer for member in self.members()}
            return linked == alive and len(alive) == len(self.local.slots)

        ready = self.local.wait_ready(READY_SECONDS)
        assert ready, f"not all serve: {[server.job_status for server in self.local.servers]}"
        eventually("the swarm is whole again", whole, READY_SECONDS)

    def wait_empty(self, seconds: float = EMPTY_SECONDS) -> None:
        """Wait until no server holds a page of a session."""
        time.sleep(COUNTED_SECONDS)
        eventually("no page is in use", lambda: not self.pages_in_use(), seconds, self.pages_in_use)


@contextmanager
def running_swarm(
    folder: Path, name: str, *, spans: int, replicas: int = 1, sessions: int = 10, length: int = 1024,
    settings: LocalSettings | None = None, adapters: Mapping[str, Path] | None = None,
    training: Mapping[str, str] | None = None,
) -> Iterator[Running]:  # fmt: skip
    """Yield a ready swarm of the model in `folder`. Each `name` is used once per test run."""
    listed = [{"name": each, "source": f"file://{path}"} for each, path in (adapters or {}).items()]
    document = f"""
apiVersion: modelswarm.io/v1alpha1
kind: ModelSwarm
metadata: {{name: {name}}}
spec:
  model: {{source: "file://{folder}", servedName: {TOY_MODEL}, adapters: {json.dumps(listed)}}}
  spans: {{count: {spans}}}
  replicas: {replicas}
  sessions: {{maxLength: {length}, concurrent: {sessions}}}
  training: {json.dumps(training or {})}
"""
    plan = plan_document(parse_document(document, name))
    with LocalSwarm(plan, settings or local_settings(name), spawn=fork_process) as local:
        running = Running(local)
        try:
            eventually(
                "the model is ready",
                lambda: any(model.ready for model in running.view.fetch_snapshot().models),
                READY_SECONDS,
            )
            running.wait_whole()
            yield running
        finally:
            running.close()
        local.raise_if_failed()


def local_settings(
    name: str,
    *,
    hash_model: bool = False,
    lease: float | None = None,
    token_budget: int | None = None,
    gateway_flags: Sequence[str] = (),
    detects_silence: bool = False,
) -> LocalSettings:
    """Return settings of a swarm that restarts servers without back-off, as a test kills many."""
    return LocalSettings(
        publish=False,
        run_name=f"test-{name}-{os.getpid()}",  # another test run may run at the same time
        threads=1,
        hash_model=hash_model,
        lease=lease,
        token_budget=token_budget,
        restart_limit=0.1,
        flags={GATEWAY_JOB: (*(() if detects_silence else PATIENT), *gateway_flags)},
    )


def metrics(target: str) -> dict[str, float]:
    """Return the metrics of a process: sample with its labels -> value."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def total(values: dict[str, float], name: str, *labels: str) -> float:
    """Return the sum of a metric's samples that have these labels, each as `name="value"`."""
    return sum(
        value
        for sample, value in values.items()
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )


def model_folder(folder: Path, context: int = CONTEXT, **changes: Any) -> Path:
    """Write a folder with the config of the hash model and the gateway's tokenizer, and return it."""
    config = {
        "num_hidden_layers": BLOCKS,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": context,
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "eos_token_id": END,
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in model_files(config=config, **changes).items():
        (folder / name).write_bytes(content)
    save_file({"model.norm.weight": np.zeros(8, np.float32)}, folder / "model.safetensors")
    return folder


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a gateway."""

    http: str
    grpc: str
    metrics: str
    admin: str
    pid: int

    @property
    def url(self) -> str:
        return f"http://{self.http}"

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum of a metric's samples that have these labels."""
        text = httpx.get(f"http://{self.metrics}/metrics", timeout=SECONDS).text
        marks = [f'{label}="{value}"' for label, value in labels.items()]
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.partition("{")[0].partition(" ")[0] == name and all(m in line for m in marks)
        )


class HashSwarm:
    """Server processes with the hash model, and gateways. Discovery is by files, as in a real run.

    Use it as a context manager: at its end all its processes are killed.
    """

    def __init__(self, root: Path, **changes: Any) -> None:
        self.root = root
        self.members = root / "members"
        self.members.mkdir(parents=True)
        self.context = changes.get("context", CONTEXT)
        self.folder = model_folder(root / "model", **changes)
        self.found_by: tuple[str, ...] = ("--discovery-dir", str(self.members))
        self.processes: dict[str, ForkedProcess] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes.values():
            process.end()

    def start(self, name: str, module: str, *flags: str) -> ForkedProcess:
        command = [sys.executable, "-m", module, *self.found_by, *flags, "--name", name]
        with (self.root / f"{name}.log").open("ab") as log:
            process = fork_process(command, os.environ | {"OMP_NUM_THREADS": "1"}, log)
        self.processes[name] = process
        return process

    def server(self, name: str, blocks: str, *flags: str, model: str = MODEL) -> None:
        """Start a server. By default its pages suffice for ten sessions of an endless context."""
        if self.context == ENDLESS and "--pages" not in flags:
            flags = (*flags, "--pages", str(10 * ENDLESS // PAGE_SIZE))
        source = ("--model", f"file://{self.folder}", "--served-name", model, "--hash-model")
        self.start(name, "modelswarm_serving", "--blocks", blocks, *source, *flags)

    def servers_ready(self, *names: str) -> None:
        for name in names:
            eventually(f"{name} serves", (self.members / f"{name}.json").exists)

    def member(self, name: str) -> dict[str, Any]:
        content: dict[str, Any] = json.loads((self.members / f"{name}.json").read_text())
        return content

    def gateway(
        self, *flags: str, name: str = "gateway", ready: bool = True, detects_silence: bool = False
    ) -> Endpoints:
        """Start a gateway. It suspects no silent server, unless `detects_silence` or a flag says otherwise."""
        if not detects_silence and not {"--hold-limit", "--suspect-after"} & set(flags):
            flags = (*PATIENT, *flags)
        (self.root / f"{name}.json").unlink(missing_ok=True)  # left by a gateway that was killed
        announced = self.root / f"{name}.json"
        flag_names = ("--http", "--grpc", "--metrics", "--admin")
        ports = [part for flag in flag_names for part in (flag, "127.0.0.1:0")]
        self.start(name, "modelswarm_gateway", *ports, "--run-file", str(announced), *flags)
        eventually("the gateway is up", announced.exists)
        announcement = json.loads(announced.read_text())
        addresses = {name: announcement[name] for name in ("http", "grpc", "metrics", "admin")}
        endpoints = Endpoints(**addresses, pid=announcement["pid"])
        if ready:
            eventually("the gateway is ready", lambda: self.is_ready(endpoints))
        return endpoints

    @staticmethod
    def is_ready(endpoints: Endpoints) -> bool:
        return httpx.get(f"{endpoints.url}/ready", timeout=SECONDS).status_code == 200

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        self.processes[name].send_signal(number)
        if number == signal.SIGKILL:
            self.processes[name].wait(SECONDS)

    def log(self, name: str) -> str:
        return (self.root / f"{name}.log").read_text()


def two_spans(root: Path, *server_flags: str, **changes: Any) -> HashSwarm:
    """Return a swarm of two ready servers that hold all blocks, without a gateway."""
    swarm = HashSwarm(root, **changes)
    swarm.server("s0", "0:2", *server_flags)
    swarm.server("s1", "2:4", *server_flags)
    swarm.servers_ready("s0", "s1")
    return swarm


def document(folder: Path, name: str = "tiny", **spec: Any) -> dict[str, Any]:
    """Return a swarm document for a model folder."""
    return {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": name},
        "spec": {"model": {"source": f"file://{folder}"}, **spec},
    }


def plan(folder: Path, *, spans: int, replicas: int, name: str = "tiny", **spec: Any) -> SwarmPlan:
    content = document(folder, name, spans={"count": spans}, replicas=replicas, **spec)
    return plan_document(ModelSwarm.parse(content))


def write_document(path: Path, folder: Path, **spec: Any) -> Path:
    """Write a swarm document as JSON, which is YAML; return its path."""
    path.write_text(json.dumps(document(folder, **spec)), encoding="utf-8")
    return path
