"""What the readiness to recover costs while nothing fails: tokens/s with it over tokens/s without it.

Two swarms of 2 spans x 1 server stand side by side: one as it is; in the other nothing is kept, servers beat every 5 s
and their silence is not suspicious for 20 s. They take turns, in the order on, off, off, on, so that a machine that
slows down slows both. `fraction` is the share of tokens/s that is lost, the median over rounds.
MODELSWARM_BENCH_ROUNDS shortens it.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import Door, swarm_of, timed_streams

ROUNDS = int(os.environ.get("MODELSWARM_BENCH_ROUNDS", "20"))
STREAMS, PROMPT, NEW = 4, 128, 96
OFF_SERVER = ("--replay-memory", "0", "--beat", "5")
OFF_GATEWAY = ("--silence", "20", "--fence", "30")


def run() -> Result:
    folder = model_folder("27m")
    with (
        swarm_of(folder, spans=2) as on,
        swarm_of(folder, spans=2, server_flags=OFF_SERVER, gateway_flags=OFF_GATEWAY) as off,
    ):
        doors = {"on": Door(on.grpc), "off": Door(off.grpc)}
        for door in doors.values():
            timed_streams(door, prompts(0), NEW)
        rounds = [one_round(doors, number) for number in range(1, ROUNDS + 1)]
    fractions = [1 - each["off"] / each["on"] for each in rounds]
    rates = {
        name: 2 * STREAMS * NEW / statistics.median(each[name] for each in rounds) for name in doors
    }
    figures = {
        "fraction": statistics.median(fractions),
        "on_tokens_s": rates["on"],
        "off_tokens_s": rates["off"],
        "fraction_q25": statistics.quantiles(fractions, n=4)[0],
        "fraction_q75": statistics.quantiles(fractions, n=4)[2],
    }
    return Result(
        name="failure_free_cost",
        figures=figures,
        columns=("rounds", "on tok/s", "off tok/s", "lost, median", "quartiles"),
        rows=[
            (
                str(ROUNDS),
                f"{rates['on']:.1f}",
                f"{rates['off']:.1f}",
                f"{figures['fraction']:.2%}",
                f"{figures['fraction_q25']:.2%} to {figures['fraction_q75']:.2%}",
            )
        ],
        shape=f"Llama 27M fp32, 2 spans x 1 server, {STREAMS} streams, prompt {PROMPT}",
        threads=1,
        bars=[Bar("fraction", "<=", 0.02)],
    )


def one_round(doors: dict[str, Door], number: int) -> dict[str, float]:
    """Seconds that each took for the same streams, twice."""
    took = dict.fromkeys(doors, 0.0)
    for name in ("on", "off", "off", "on"):
        took[name] += timed_streams(doors[name], prompts(number), NEW)
    return took


def prompts(number: int) -> Sequence[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(1, SHAPES["27m"].vocab) for _ in range(PROMPT)] for _ in range(STREAMS)]
