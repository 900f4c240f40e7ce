"""Cost of the sampler: the end of a tail's step with all processors on, over greedy, for 32 rows of 128k tokens.

One process, no network: output head and sampler on the CPU, as `TransformerSpan` runs them, rows in the same parts. The
blocks are left out, so a whole step has a lower ratio.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from bench.harness import Result
from modelswarm.placement.memory import sample_rows
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import SampleRequest
from modelswarm_serving.model.sampling.sampler import sample

RUNS, ROWS, VOCABULARY, HIDDEN = 3, 32, 128_256, 1024
PROMPT, GENERATED = 1000, 200
ALL = Sampling(
    temperature=0.8, top_k=50, top_p=0.95, min_p=0.01, typical_p=0.95, repetition_penalty=1.1,
    presence_penalty=0.3, frequency_penalty=0.2, no_repeat_ngram_size=4, min_tokens=500, eos=(2,),
    logit_bias=tuple((token, 0.5) for token in range(100, 400)), logprobs=20, seed=1,
    bad_words=tuple((token, token + 1) for token in range(100)),
)  # fmt: skip
CASES = {
    "greedy": Sampling(),
    "filters": Sampling(temperature=0.8, top_k=50, top_p=0.95, seed=1),
    "all": ALL,
}


def run() -> Result:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    head = torch.randn(HIDDEN, VOCABULARY) / HIDDEN**0.5
    rows = torch.randn(ROWS, HIDDEN) * 4
    log = torch.randint(0, VOCABULARY, (PROMPT + GENERATED,)).tolist()
    requests = {
        name: [SampleRequest(sampling, len(log), log, PROMPT)] * ROWS
        for name, sampling in CASES.items()
    }
    for picks in requests.values():
        _step(rows, head, picks)
    seconds = {
        name: min(_step(rows, head, picks) for _ in range(RUNS)) for name, picks in requests.items()
    }
    figures = {f"{name}_ms": value * 1e3 for name, value in seconds.items()}
    figures["ratio"] = seconds["all"] / seconds["greedy"]
    return Result(
        name="sampler_cost",
        figures=figures,
        columns=("what", "value"),
        rows=[(name, f"{value:.2f}") for name, value in figures.items()],
        shape=f"{ROWS} rows, {VOCABULARY} tokens, head of width {HIDDEN} in float32, logs of {len(log)}",
        threads=1,
        bars=[],
    )


def _step(rows: Tensor, head: Tensor, picks: Sequence[SampleRequest]) -> float:
    began = time.perf_counter()
    logits = rows @ head
    part = sample_rows(VOCABULARY)
    for start in range(0, ROWS, part):
        sample(logits[start : start + part], picks[start : start + part])
    return time.perf_counter() - began
