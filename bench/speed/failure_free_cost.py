"""Cost of failure detection and recovery without failures: tokens/s with them relative to tokens/s without.

Two swarms of 2 spans x 2 servers run side by side. One has the defaults. The other has no replay log, heartbeats every
5 s, and suspects a server after 20 s of silence. They take turns in the order on, off, off, on, so that a machine that
slows down affects both. In a measurement the swarm that started first differed by 5 % from an equal one. So half of
the rounds run on swarms started in the other order. `fraction` is the lost share of tokens/s, the mean of both
medians. MODELSWARM_BENCH_ROUNDS sets the number of rounds.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import StreamClient, bench_swarm, time_streams

ROUNDS = int(os.environ.get("MODELSWARM_BENCH_ROUNDS", "20"))
STREAMS, PROMPT, NEW = 4, 1000, 96
LENGTH = PROMPT + NEW
OFF_SERVER = ("--replay-memory", "0", "--heartbeat", "5")
OFF_GATEWAY = ("--suspect-after", "20", "--fence-timeout", "30")


FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # flags of servers and of the gateway
    "on": ((), ()),
    "off": (OFF_SERVER, OFF_GATEWAY),
}


def run() -> Result:
    halves = [run_rounds(order) for order in (("on", "off"), ("off", "on"))]
    fractions = [[1 - each["off"] / each["on"] for each in half] for half in halves]
    every = [each for half in halves for each in half]
    rates = {
        name: 2 * STREAMS * NEW / statistics.median(each[name] for each in every) for name in FLAGS
    }
    figures = {
        "fraction": statistics.mean(map(statistics.median, fractions)),
        "fraction_on_first": statistics.median(fractions[0]),
        "fraction_off_first": statistics.median(fractions[1]),
        "on_tokens_s": rates["on"],
        "off_tokens_s": rates["off"],
    }
    shown = ("fraction", "fraction_on_first", "fraction_off_first")
    return Result(
        name="failure_free_cost",
        figures=figures,
        columns=("rounds", "on tok/s", "off tok/s", "lost", "on started first", "off first"),
        rows=[
            (
                str(len(every)),
                f"{rates['on']:.1f}",
                f"{rates['off']:.1f}",
                *(f"{figures[name]:.2%}" for name in shown),
            )
        ],
        shape=f"Llama 27M fp32, 2 spans x 2 servers, {STREAMS} streams, prompt {PROMPT}",
        threads=1,
        bars=[Bar("fraction", "<=", 0.02)],
    )


def run_rounds(order: Sequence[str]) -> list[dict[str, float]]:
    """Run half of the rounds, on swarms started in this order."""
    folder = model_folder("27m")
    with ExitStack() as stack:
        clients = {}
        for name in order:
            servers, gateway = FLAGS[name]
            swarm = bench_swarm(
                folder,
                spans=2,
                replicas=2,
                max_length=LENGTH,
                server_flags=servers,
                gateway_flags=gateway,
            )
            clients[name] = StreamClient(stack.enter_context(swarm).grpc)
        for client in clients.values():
            time_streams(client, make_prompts(0), NEW)
        return [run_round(clients, number) for number in range(1, ROUNDS // 2 + 1)]


def run_round(clients: dict[str, StreamClient], number: int) -> dict[str, float]:
    """Return the seconds of each swarm for the same streams, run twice."""
    took = dict.fromkeys(clients, 0.0)
    for name in ("on", "off", "off", "on"):
        took[name] += time_streams(clients[name], make_prompts(number), NEW)
    return took


def make_prompts(number: int) -> Sequence[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)] for _ in range(STREAMS)]
