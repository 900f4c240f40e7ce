"""Time of eight streams that follow a JSON schema over that of eight free ones, on one swarm of two spans.

Both take turns, in the order free, guided, guided, free. The schema has strings, numbers and choices, and answers that
never end before their last token. `fraction` is the median over rounds of the additional time, prefill included.
MODELSWARM_BENCH_ROUNDS sets the number of rounds.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import NAME, bench_swarm

ROUNDS = int(os.environ.get("MODELSWARM_BENCH_ROUNDS", "7"))
SHAPE, STREAMS, PROMPT, NEW = "59m-text", 8, 32, 128
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 5},
        "count": {"type": "integer", "minimum": 0, "maximum": 10_000},
        "kind": {"enum": ["small", "medium", "large"]},
    },
    "required": ["name", "tags", "count", "kind"],
    "additionalProperties": False,
}
FREE: dict[str, Any] = {"ignore_eos": True}
GUIDED: dict[str, Any] = {"guided_json": {"type": "array", "items": ITEM, "minItems": NEW}}


def run() -> Result:
    fractions, seconds = list[float](), {"free": list[float](), "guided": list[float]()}
    with (
        bench_swarm(model_folder(SHAPE), spans=2) as swarm,
        httpx.Client(base_url=f"http://{swarm.http}", timeout=300) as client,
    ):
        for number in range(ROUNDS + 1):
            took = {"free": 0.0, "guided": 0.0}
            for name in ("free", "guided", "guided", "free"):
                took[name] += time_answers(client, number, FREE if name == "free" else GUIDED)
            if number:  # the first round is a warm-up
                fractions.append(took["guided"] / took["free"] - 1)
                for name, value in took.items():
                    seconds[name].append(value)
    rates = {name: 2 * STREAMS * NEW / statistics.median(each) for name, each in seconds.items()}
    figures = {
        "fraction": statistics.median(fractions),
        "free_tokens_s": rates["free"],
        "guided_tokens_s": rates["guided"],
    }
    return Result(
        name="guided_overhead",
        figures=figures,
        columns=("rounds", "free tok/s", "guided tok/s", "fraction", "over rounds"),
        rows=[
            (
                str(ROUNDS),
                f"{rates['free']:.1f}",
                f"{rates['guided']:.1f}",
                f"{figures['fraction']:.2%}",
                f"{min(fractions):.2%} .. {max(fractions):.2%}",
            )
        ],
        shape=f"Llama 59M fp32 with 32,000 tokens, 2 spans, {STREAMS} streams, prompt {PROMPT}, {NEW} new",
        threads=1,
        bars=[Bar("fraction", "<=", 0.05)],
    )


def time_answers(client: httpx.Client, number: int, fields: dict[str, Any]) -> float:
    """Return the seconds until all answers, started together, have ended. Each has NEW tokens."""
    rng = random.Random(number)
    vocabulary = SHAPES[SHAPE].vocab
    prompts = [[rng.randrange(256, vocabulary - 1) for _ in range(PROMPT)] for _ in range(STREAMS)]

    def complete(prompt: list[int]) -> int:
        body = {"model": NAME, "prompt": prompt, "max_tokens": NEW, "temperature": 0, **fields}
        answer = client.post("/v1/completions", json=body)
        answer.raise_for_status()
        tokens: int = answer.json()["usage"]["completion_tokens"]
        return tokens

    with ThreadPoolExecutor(STREAMS) as pool:
        began = time.perf_counter()
        counts = list(pool.map(complete, prompts))
        seconds = time.perf_counter() - began
    if counts != [NEW] * STREAMS:
        raise RuntimeError(f"{counts} tokens came, {NEW} were wanted of each")
    return seconds
