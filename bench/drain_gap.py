"""Drains under eight streams: the longest pause a reader sees over the usual one. 2 spans x 2 servers, 1K contexts.

Each drain moves every session that is on a server to the other one of its span; the next drain moves them back. The
streams are replaced as they end. `ratio` is the longest gap between two tokens of any stream in all drains over the
median gap while nothing is drained.
"""

from __future__ import annotations

import random
import statistics
import threading
import time

import grpc

from bench.harness import Bar, Result, quantile
from bench.models import SHAPES, model_folder
from bench.swarm import Door, Recorder, swarm_of
from modelswarm.local.swarm_door import SwarmDoor, server_name

DRAINS = 2
STREAMS, PROMPT, NEW = 8, 1000, 900
QUIET_SECONDS = 3.0
DRAIN_SECONDS = 300.0
Window = tuple[float, float]


class Readers:
    """Streams that follow one another, each read by a thread; every gap with the time at which it ended."""

    def __init__(self, target: str) -> None:
        self._door = Door(target)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._gaps: list[tuple[float, float]] = []
        self.failures = 0
        self.reading = 0  # streams past their first tokens
        self._threads = [threading.Thread(target=self._read, args=(n,)) for n in range(STREAMS)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        rng = random.Random(number)
        first = (
            rng.randrange(NEW // STREAMS) + number * NEW // STREAMS
        )  # so that not all end at once
        while not self._stop.is_set():
            prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
            try:
                self._stream(prompt, max(200, first) if first else NEW)
            except grpc.RpcError:
                self.failures += 1
            first = 0

    def _stream(self, prompt: list[int], new: int) -> None:
        recorder = Recorder()
        for part in self._door.parts(prompt, new):
            recorder.add(part)
            if len(recorder.times) == 2:
                self.reading += 1
            if len(recorder.times) >= 2:
                before, now = recorder.times[-2:]
                with self._lock:
                    self._gaps.append((now, now - before))
            if self._stop.is_set():
                break

    def gaps(self, window: Window) -> list[float]:
        """Of tokens that came in that time, or were waited for at its end."""
        since, until = window
        with self._lock:
            return [gap for at, gap in self._gaps if since <= at and at - gap <= until]

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def run() -> Result:
    drains: list[Window] = []
    quiet: list[Window] = []
    moved = 0
    with swarm_of(
        model_folder("27m"), spans=2, replicas=2, max_length=2000, sessions=2 * STREAMS
    ) as swarm:
        view = SwarmDoor(swarm.grpc)
        readers = Readers(swarm.grpc)
        try:
            _until(lambda: readers.reading >= STREAMS)
            names = [server.slot.name for server in swarm.servers]
            for number in range(DRAINS):
                quiet.append(_quiet())
                span = number % 2
                victim = _busier(view, [name for name in names if f"-s{span}-" in name])
                window, sessions = _drain(view, victim)
                drains.append(window)
                moved += sessions
        finally:
            readers.stop()
    return _result(readers, quiet, drains, moved)


def _quiet() -> Window:
    began = time.perf_counter()
    time.sleep(QUIET_SECONDS)
    return began, time.perf_counter()


def _busier(view: SwarmDoor, names: list[str]) -> str:
    servers = {server_name(s.peer): s.own_sessions for s in view.snapshot().servers}
    return max(names, key=lambda name: servers[name])


def _drain(view: SwarmDoor, name: str) -> tuple[Window, int]:
    """When it was drained, and how many sessions left it."""
    began = time.perf_counter()
    states = list(view.drain(name, timeout=DRAIN_SECONDS))
    ended = time.perf_counter()
    list(view.drain(name, undo=True))
    return (began, ended), states[0].own_sessions


def _until(condition: object, seconds: float = 120.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError("the streams did not start")
        time.sleep(0.05)


def _result(readers: Readers, quiet: list[Window], drains: list[Window], moved: int) -> Result:
    calm = [gap for window in quiet for gap in readers.gaps(window)]
    usual = statistics.median(calm)
    longest = [max(readers.gaps(window), default=0.0) for window in drains]
    seconds = [until - since for since, until in drains]
    figures = {
        "ratio": max(longest) / usual,
        "ratio_p50": quantile(longest, 0.5) / usual,
        "quiet_ratio": max(calm) / usual,
        "median_gap_s": usual,
        "longest_gap_s": max(longest),
        "drain_p50_s": quantile(seconds, 0.5),
        "moved": moved,
        "failures": readers.failures,
    }
    return Result(
        name="drain_gap",
        figures=figures,
        columns=("drains", "moved", "median gap ms", "longest ms", "ratio", "ratio p50", "quiet"),
        rows=[
            (
                str(len(drains)),
                str(moved),
                f"{1000 * usual:.1f}",
                f"{1000 * max(longest):.1f}",
                f"{figures['ratio']:.2f}",
                f"{figures['ratio_p50']:.2f}",
                f"{figures['quiet_ratio']:.2f}",
            )
        ],
        shape=f"Llama 27M fp32, 2 spans x 2 servers, {STREAMS} streams, prompt {PROMPT}",
        threads=1,
        bars=[Bar("ratio", "<=", 3), Bar("failures", "<=", 0)],
    )
