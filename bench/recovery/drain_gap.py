"""Drains under eight streams: the longest gap between tokens relative to the median. 2 spans x 2 servers, 1K prompts.

Each drain migrates all sessions of a server to the other server of its span; the next drain of that span migrates them
back. Eight streams run together and are replaced together near their end, so no prefill runs during a drain. The ratio
of a drain is the longest gap between two tokens of any stream during the drain, over a median gap. That median is of
the two seconds before, with contexts of the same length. `ratio` is the maximum over all drains.
MODELSWARM_BENCH_DRAINS sets the number of drains, MODELSWARM_BENCH_CONTEXT the maximum context.
"""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from bench.harness import Bar, Result, quantile
from bench.models import SHAPES, model_folder
from bench.swarm import StreamClient, bench_swarm
from modelswarm.client.swarm import SwarmClient
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of

DRAINS = int(os.environ.get("MODELSWARM_BENCH_DRAINS", "40"))
STREAMS, PROMPT = 8, 1000
MAX_CONTEXT = int(os.environ.get("MODELSWARM_BENCH_CONTEXT", "1500"))  # tokens at a drain's start
MAX_LENGTH = MAX_CONTEXT + 1500  # a drain and the pauses around it take fewer tokens
QUIET_SECONDS = 2.0
DRAIN_TIMEOUT_SECONDS = 240.0
START_TIMEOUT_SECONDS = 240.0
MODEL = "27m"
Span = tuple[float, float]


class Reader:
    """One stream, read by a thread, and the arrival time of each token."""

    def __init__(self, client: StreamClient, seed: int) -> None:
        rng = random.Random(seed)
        self._prompt = [rng.randrange(1, SHAPES[MODEL].vocab) for _ in range(PROMPT)]
        self._client = client
        self._stop = threading.Event()
        self.times: list[float] = []
        self.failed = False
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for part in self._client.stream_parts(self._prompt, MAX_LENGTH - PROMPT):
                self.times += [time.perf_counter()] * len(part.token_ids)
                if self._stop.is_set():
                    return
        except grpc.RpcError:
            self.failed = True

    def gaps(self, span: Span) -> list[float]:
        """Return the gaps between tokens that overlap with a time span."""
        since, until = span
        pairs = zip(self.times, self.times[1:], strict=False)
        return [b - a for a, b in pairs if b >= since and a <= until]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def start_readers(swarm: LocalSwarm, seed: int) -> Iterator[list[Reader]]:
    client = StreamClient(swarm.grpc)
    readers = [Reader(client, 100 * seed + number) for number in range(STREAMS)]
    try:
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not all(len(reader.times) > 10 for reader in readers):
            if time.monotonic() > deadline:
                raise RuntimeError("the streams did not start")
            time.sleep(0.05)
        yield readers
    finally:
        for reader in readers:
            reader.stop()


class DrainMeasurements:
    def __init__(self) -> None:
        self.quiet: list[float] = []  # seconds: all gaps while no server is drained
        self.usual: list[float] = []  # seconds: median gap before each drain
        self.longest: list[float] = []  # seconds: longest gap during each drain
        self.seconds: list[float] = []
        self.moved = self.failures = 0

    def run_drain(self, view: SwarmClient, readers: list[Reader], names: list[str]) -> None:
        """Drain the server with most sessions of these, while all streams are read."""
        quiet = _wait_quiet()
        servers = {name_of(s.peer): s.own_sessions for s in view.fetch_snapshot().servers}
        name = max(names, key=lambda each: servers[each])
        began = time.perf_counter()
        states = list(view.drain_server(name, timeout=DRAIN_TIMEOUT_SECONDS))
        ended = time.perf_counter()
        list(view.drain_server(name, undo=True))
        _wait_quiet()
        self.moved += states[0].own_sessions
        self.seconds.append(ended - began)
        before = _gaps_of(readers, quiet)
        self.quiet += before
        self.usual.append(statistics.median(before))
        self.longest.append(max(_gaps_of(readers, (began, ended))))

    @property
    def ratios(self) -> list[float]:
        return [most / usual for most, usual in zip(self.longest, self.usual, strict=True)]


def _gaps_of(readers: list[Reader], span: Span) -> list[float]:
    return [gap for reader in readers for gap in reader.gaps(span)]


def _wait_quiet() -> Span:
    began = time.perf_counter()
    time.sleep(QUIET_SECONDS)
    return began, time.perf_counter()


def run() -> Result:
    found = DrainMeasurements()
    folder = model_folder(MODEL)
    with bench_swarm(
        folder, spans=2, replicas=2, max_length=MAX_LENGTH, sessions=2 * STREAMS
    ) as swarm:
        view = SwarmClient(swarm.admin)
        names = [server.slot.name for server in swarm.servers]
        spans = [[name for name in names if f"-s{span}-" in name] for span in range(2)]
        seed = 0
        while len(found.longest) < DRAINS:
            seed += 1
            with start_readers(swarm, seed) as readers:
                while len(found.longest) < DRAINS and all(map(_has_enough_left, readers)):
                    found.run_drain(view, readers, spans[len(found.longest) % 2])
            found.failures += sum(reader.failed for reader in readers)
    return _result(found)


def _has_enough_left(reader: Reader) -> bool:
    return not reader.failed and PROMPT + len(reader.times) < MAX_CONTEXT


def _result(found: DrainMeasurements) -> Result:
    usual = statistics.median(found.quiet)
    figures = {
        "ratio": max(found.ratios),
        "ratio_p50": quantile(found.ratios, 0.5),
        "quiet_ratio": max(found.quiet) / usual,
        "median_gap_s": usual,
        "longest_gap_s": max(found.longest),
        "drain_p50_s": quantile(found.seconds, 0.5),
        "moved": found.moved,
        "failures": found.failures,
    }
    return Result(
        name="drain_gap",
        figures=figures,
        columns=("drains", "moved", "median ms", "longest ms", "ratio", "p50", "quiet", "drain s"),
        rows=[
            (
                str(len(found.longest)),
                str(found.moved),
                f"{1000 * usual:.1f}",
                f"{1000 * max(found.longest):.1f}",
                *(f"{figures[name]:.2f}" for name in ("ratio", "ratio_p50", "quiet_ratio")),
                f"{figures['drain_p50_s']:.1f}",
            )
        ],
        shape=f"Llama 27M fp32, 2 spans x 2 servers, {STREAMS} streams, contexts {PROMPT} to {MAX_CONTEXT}",
        threads=1,
        bars=[Bar("ratio", "<=", 3), Bar("failures", "<=", 0)],
    )
