"""The system under test: a local swarm of a benchmark shape, and streams through its gateway's gRPC API.

Used by the benchmarks on one machine. Does not know what is measured.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import grpc

from modelswarm.local.commands import LocalSettings
from modelswarm.local.planning import plan_document
from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm.resources.loading import parse_document

START_TIMEOUT_SECONDS = 120.0
STREAM_TIMEOUT_SECONDS = 300.0
NAME = "bench"


@contextmanager
def bench_swarm(
    folder: Path,
    spans: int,
    replicas: int = 1,
    max_length: int = 1024,
    sessions: int = 10,
    server_flags: tuple[str, ...] = (),
    gateway_flags: tuple[str, ...] = (),
) -> Iterator[LocalSwarm]:
    """Run a swarm of that model folder, one torch thread per server."""
    slots = [f"{NAME}-s{span}-r{rank}" for span in range(spans) for rank in range(replicas)]
    mark = "-flags" if server_flags or gateway_flags else ""
    document = f"""
apiVersion: modelswarm.io/v1alpha1
kind: ModelSwarm
metadata: {{name: {NAME}}}
spec:
  model: {{source: "file://{folder}", servedName: {NAME}}}
  spans: {{count: {spans}}}
  replicas: {replicas}
  sessions: {{maxLength: {max_length}, concurrent: {sessions}}}
"""
    settings = LocalSettings(
        publish=False,
        threads=1,
        restart_limit=0.5,  # seconds; benchmarks kill for minutes, and restarts do not change a gap
        run_name=f"bench-{folder.name}-{spans}x{replicas}{mark}",
        flags={**dict.fromkeys(slots, server_flags), GATEWAY_JOB: gateway_flags},
    )
    with LocalSwarm(plan_document(parse_document(document, "bench")), settings) as swarm:
        if not swarm.wait_ready(START_TIMEOUT_SECONDS):
            raise RuntimeError("the swarm did not start")
        yield swarm


@dataclass(frozen=True, slots=True)
class StreamResult:
    """One answer: its tokens, and the arrival times of its chunks."""

    tokens: tuple[int, ...]
    positions: tuple[int, ...]  # position of every token in the session's log
    times: tuple[float, ...]  # time.perf_counter, in seconds, of every chunk with tokens

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in pairwise(self.times)]


class Recorder:
    """Collects the messages of a stream into a StreamResult."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.times: list[float] = []

    def add(self, part: api_pb2.GenerateResponse) -> None:
        if part.token_ids:
            self.times.append(time.perf_counter())
            self.tokens += part.token_ids
            self.positions += range(part.position, part.position + len(part.token_ids))

    def result(self) -> StreamResult:
        return StreamResult(tuple(self.tokens), tuple(self.positions), tuple(self.times))


class StreamClient:
    """Streams with token ids as input and output."""

    def __init__(self, target: str) -> None:
        self._stub = api_pb2_grpc.InferenceStub(grpc.insecure_channel(target))

    def stream_parts(
        self, prompt: Sequence[int], new: int, seed: int | None = None
    ) -> Iterator[api_pb2.GenerateResponse]:
        """Stream exactly `new` tokens, greedy without a seed, else sampled."""
        sampling = api_pb2.Sampling(temperature=0.0 if seed is None else 0.8)
        if seed is not None:
            sampling.seed = seed
        request = api_pb2.GenerateRequest(
            model=NAME,
            tokens=api_pb2.TokenIds(ids=prompt),
            max_tokens=new,
            sampling=sampling,
            ignore_eos=True,
        )
        yield from self._stub.GenerateStream(request, timeout=STREAM_TIMEOUT_SECONDS)

    def run_stream(self, prompt: Sequence[int], new: int, seed: int | None = None) -> StreamResult:
        recorder = Recorder()
        for part in self.stream_parts(prompt, new, seed):
            recorder.add(part)
        return recorder.result()


def time_streams(client: StreamClient, prompts: Sequence[Sequence[int]], new: int) -> float:
    """Return the seconds until all streams, started together, have ended. Each must give `new` tokens."""
    done: list[StreamResult] = []
    threads = [
        threading.Thread(target=lambda p=p: done.append(client.run_stream(p, new))) for p in prompts
    ]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if len(done) != len(prompts) or any(len(stream.tokens) != new for stream in done):
        raise RuntimeError(
            f"{[len(stream.tokens) for stream in done]} tokens came, {new} were wanted of each"
        )
    return seconds
