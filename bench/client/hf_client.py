"""`model.generate` of the Hugging Face class against the gateway's own gRPC stream: one swarm, one answer at a time.

The servers choose the tokens, unless `generate` is given a logits processor of the caller: then each step brings the
logits to the client. The processor here changes nothing, so all three ways give the same greedy tokens.
"""

from __future__ import annotations

import random
import time
from statistics import median
from typing import Any

import torch

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import StreamClient, bench_swarm
from modelswarm.client.hf import AutoDistributedModelForCausalLM

SHAPE, PROMPT, NEW, ROUNDS = "27m", 32, 128, 15
WAYS = {
    "stream": "the gateway's stream",
    "servers": "generate",
    "client": "generate, logits to the client",
}


def run() -> Result:
    torch.set_num_threads(1)
    folder = model_folder(SHAPE)
    rng = random.Random(1)
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    with bench_swarm(folder, spans=2) as swarm:
        client = StreamClient(swarm.grpc)
        model = AutoDistributedModelForCausalLM.from_pretrained(folder, gateway=swarm.grpc)
        for number in range(ROUNDS + 1):
            prompt = [rng.randrange(1, SHAPES[SHAPE].vocab) for _ in range(PROMPT)]
            calls = {
                "stream": lambda p=prompt: list(client.run_stream(p, NEW).tokens),
                "servers": lambda p=prompt: generate(model, p),
                "client": lambda p=prompt: generate(model, p, logits_processor=[_unchanged]),
            }
            answers = {}
            for way in sorted(WAYS, reverse=bool(number % 2)):  # no way always comes first
                began = time.perf_counter()
                answers[way] = calls[way]()
                if number:  # the first round is a warm-up
                    rates[way].append(NEW / (time.perf_counter() - began))
            if len({tuple(answer) for answer in answers.values()}) != 1:
                raise RuntimeError("the three ways gave different tokens")
    return _result(rates)


def generate(model: Any, prompt: list[int], **options: Any) -> list[int]:
    """Return `NEW` greedy tokens."""
    tokens = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None, **options
    )
    new: list[int] = tokens[0, len(prompt) :].tolist()
    return new


def _unchanged(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


def _result(rates: dict[str, list[float]]) -> Result:
    figures, rows = {}, []
    for way, name in WAYS.items():
        ratios = [rate / own for rate, own in zip(rates[way], rates["stream"], strict=True)]
        figures[f"{way}_tokens_per_second"] = median(rates[way])
        figures["ratio" if way == "servers" else f"ratio_{way}"] = median(ratios)
        over = f"{min(ratios):.2f} .. {max(ratios):.2f}"
        rows.append((name, f"{median(rates[way]):.1f}", f"{median(ratios):.2f}", over))
    return Result(
        name="hf_client",
        figures=figures,
        columns=("way", "tok/s", "ratio", "over rounds"),
        rows=rows,
        shape=f"Llama 27M fp32, 2 spans, one stream, prompt {PROMPT}, {NEW} new",
        threads=1,
        bars=[Bar("ratio", ">=", 0.9)],
    )
