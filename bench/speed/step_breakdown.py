"""The parts of a token's way through three servers, from frame in to frame out: one stream, a model that is very small.

Each server notes the times of its steps (`timed_server.py`). The write, the socket and the read by the next server are
one part: no process sees them apart.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

import grpc

from bench.harness import Result
from bench.models import model_folder
from bench.speed.timed_server import MARKS, Step
from bench.swarm import NAME, START_TIMEOUT_SECONDS, StreamClient
from modelswarm.local.commands import child_environment
from modelswarm.process.run_files import read_gateway_file

SERVERS = {"s0": "0:2", "s1": "2:5", "s2": "5:8"}
TITLES = (
    "decode the frame",
    "core: take the rows or the token",
    "plan the batch",
    "hand-over to the engine's thread",
    "batch layout, rows as a tensor",
    "blocks",
    "rows as bytes; at the tail: norm, head, sampler",
    "hand-over to the event loop",
    "core: results to messages",
    "queue the message",
    "encode the frame",
)
"""Names of the parts between neighbours in MARKS, without the last one."""
SOCKET = "write, socket, read by the next"
WRITE = "of it, until the call of the write returns"
NEW, WARM_UP = 512, 64
STOP_SECONDS = 60.0


def run() -> Result:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with timed_swarm(folder) as target:
            client = StreamClient(target)
            client.run_stream([1, 2, 3], WARM_UP)
            gaps = client.run_stream([1, 2, 3], NEW).gaps
        recorded = [read_steps(folder / f"{server}.json") for server in SERVERS]
    parts = {
        server: part_medians(steps, recorded[index - 1])
        for index, (server, steps) in enumerate(zip(SERVERS, recorded, strict=True))
    }
    return Result(
        name="step_breakdown",
        figures={
            **{
                f"{server}: {part}": us
                for server, each in parts.items()
                for part, us in each.items()
            },
            "token_us": median(gaps) * 1e6,
        },
        columns=("us", "first server", "middle", "tail"),
        rows=table_rows(list(parts.values()), median(gaps) * 1e6),
        shape="Llama 1M fp32 (8 blocks), one stream, spans of 2, 3 and 3 blocks",
        threads=1,
    )


def part_medians(steps: Sequence[Step], before: Sequence[Step]) -> dict[str, float]:
    """Return the median us of each part of a server's steps. `before`: the steps of the server that sends to it."""
    whole = whole_steps(steps)
    sent = sorted(step["encoded"] for step in whole_steps(before))
    found: dict[str, list[int]] = {title: [] for title in (*TITLES, SOCKET, WRITE)}
    for step in whole:
        for title, (begin, end) in zip((*TITLES, WRITE), pairwise(MARKS), strict=True):
            found[title].append(step[end] - step[begin])
        place = bisect_left(sent, step["frame"])
        if place:
            found[SOCKET].append(step["frame"] - sent[place - 1])
    return {title: median(values) / 1e3 for title, values in found.items()}


def whole_steps(steps: Sequence[Step]) -> list[Step]:
    """Return the last NEW steps that have all marks: those of one row, without a flow-control message in between."""
    whole = [step for step in steps if all(mark in step for mark in MARKS)]
    if len(whole) < NEW // 2:
        raise RuntimeError(f"only {len(whole)} whole steps were noted")
    return whole[-NEW:]


def table_rows(parts: Sequence[Mapping[str, float]], token_us: float) -> list[tuple[str, ...]]:
    rows = [
        (title, *(f"{each[title]:.0f}" for each in parts)) for title in (SOCKET, *TITLES, WRITE)
    ]
    sums = [sum(us for title, us in each.items() if title != WRITE) for each in parts]
    rows.append(("all parts", *(f"{each:.0f}" for each in sums)))
    return [*rows, (f"three servers {sum(sums):.0f}; at the client {token_us:.0f}", "", "", "")]


def read_steps(file: Path) -> list[Step]:
    steps: list[Step] = json.loads(file.read_text())
    return steps


@contextmanager
def timed_swarm(folder: Path) -> Iterator[str]:
    """Run three timed servers and a gateway; yield its gRPC address. The servers write their times when they stop."""
    members, run_file = folder / "members", folder / "gateway.json"
    members.mkdir()
    shared = ("--model", f"file://{model_folder('1m')}", "--served-name", NAME, "--threads", "1")
    sizes = ("--device", "cpu", "--pages", "128", "--max-length", "1024")
    found = ("--discovery-dir", str(members))
    with ExitStack() as stack:
        for name, blocks in SERVERS.items():
            flags = (*shared, *sizes, *found, "--name", name, "--blocks", blocks)
            times = str(folder / f"{name}.json")
            stack.enter_context(process("bench.speed.timed_server", times, *flags))
        ports = [
            part
            for port in ("http", "grpc", "metrics", "admin")
            for part in (f"--{port}", "127.0.0.1:0")
        ]
        stack.enter_context(
            process("modelswarm_gateway", *found, *ports, "--run-file", str(run_file))
        )
        yield wait_served(run_file)


def wait_served(run_file: Path) -> str:
    """Return the gateway's gRPC address once it has generated a token."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        known = read_gateway_file(run_file)
        try:
            if known is not None:
                StreamClient(known.grpc).run_stream([1], 1)
                return known.grpc
        except grpc.RpcError:
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise RuntimeError("the gateway did not start")
        time.sleep(0.2)


@contextmanager
def process(module: str, *arguments: str) -> Iterator[None]:
    command = [sys.executable, "-m", module, *arguments]
    child = subprocess.Popen(command, env=child_environment(1), stderr=subprocess.DEVNULL)
    try:
        yield
        child.send_signal(signal.SIGTERM)
        child.wait(STOP_SECONDS)
    finally:
        child.kill()
        child.wait()
