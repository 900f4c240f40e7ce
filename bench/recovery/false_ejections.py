"""Ten minutes of twice the planned load, without a fault: no server may be ejected or suspected.

Twenty clients send request after request to a swarm with capacity for ten sessions; a refused client retries after
0.2 s. Every ejection is a false one. MODELSWARM_BENCH_OVERLOAD_SECONDS sets the duration.
"""

from __future__ import annotations

import os
import random
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import StreamClient, bench_swarm

SECONDS = float(os.environ.get("MODELSWARM_BENCH_OVERLOAD_SECONDS", "600"))
SESSIONS_PER_SERVER, CLIENTS = (
    5,
    20,
)  # capacity of each of the two servers of a span
PROMPT, NEW = 1000, 60
LENGTH = PROMPT + NEW
EJECTIONS = "modelswarm_gateway_ejections_total"
REROUTES = "modelswarm_gateway_reroutes_total"


def run() -> Result:
    asked: Counter[str] = Counter()
    with bench_swarm(
        model_folder("27m"), spans=2, replicas=2, max_length=LENGTH, sessions=SESSIONS_PER_SERVER
    ) as swarm:
        until = time.monotonic() + SECONDS
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = [
                pool.submit(run_client, swarm.grpc, number, until, asked)
                for number in range(CLIENTS)
            ]
        for client in clients:
            client.result()  # raises the error of a client
        counted = read_metrics(swarm.metrics)
    ejected = {name: value for name, value in counted.items() if name.startswith(EJECTIONS)}
    rerouted = sum(value for name, value in counted.items() if name.startswith(REROUTES))
    count = int(sum(ejected.values()))
    return Result(
        name="false_ejections",
        figures={
            "count": count,
            "reroutes": rerouted,
            "answered_per_s": asked["answered"] / SECONDS,
            "refused_per_s": asked["refused"] / SECONDS,
            "seconds": SECONDS,
        },
        columns=("seconds", "answered", "refused", "reroutes", "ejections"),
        rows=[
            (
                f"{SECONDS:.0f}",
                str(asked["answered"]),
                str(asked["refused"]),
                f"{rerouted:.0f}",
                ", ".join(
                    f"{name.partition('{')[2][:-1]} {n:.0f}" for name, n in ejected.items() if n
                )
                or "0",
            )
        ],
        shape=f"Llama 27M fp32, 2 spans x 2 servers, room for {2 * SESSIONS_PER_SERVER} sessions, "
        f"{CLIENTS} clients, prompt {PROMPT}",
        threads=1,
        bars=[
            Bar("count", "<=", 0),
            Bar("answered_per_s", ">=", 0.5),  # the swarm answered
            Bar("refused_per_s", ">=", 0.5),  # the load exceeded the capacity
        ],
    )


def run_client(target: str, number: int, until: float, asked: Counter[str]) -> None:
    client, rng = StreamClient(target), random.Random(number)
    while time.monotonic() < until:
        prompt = [rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)]
        try:
            client.run_stream(prompt, NEW)
            asked["answered"] += 1
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
            asked["refused"] += 1
            time.sleep(0.2)


def read_metrics(target: str) -> dict[str, float]:
    """Return the values of all metrics by name with labels."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}
