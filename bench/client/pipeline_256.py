"""256 mixed prompts through `pipeline` on two spans, against `generate` in sorted batches of 8.

Prompts have 8 to 256 tokens, answers 16 to 64, in random order. `generate` runs with one thread, as in the other
benchmarks of two spans, and also with two threads, as many as the two servers have.
"""

from __future__ import annotations

import random
import time
from statistics import median

from bench.client.batch_generate import BATCH, BatchGenerate
from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import bench_swarm
from modelswarm import GenerationConfig, Pipeline, pipeline

PROMPTS = 256
LENGTHS, NEW = (8, 256), (16, 64)
ROUNDS = 3
SHAPE, AT_A_TIME = "27m", 32
Work = tuple[list[list[int]], list[int]]


def run() -> Result:
    folder = model_folder(SHAPE)
    rounds = [make_work(PROMPTS, seed) for seed in range(ROUNDS)]
    rates: dict[str, list[float]] = {"one": [], "two": [], "pipeline": []}
    with (
        BatchGenerate(folder, 1) as one,
        BatchGenerate(folder, 2) as two,
        bench_swarm(folder, spans=2, max_length=512, sessions=AT_A_TIME) as swarm,
        pipeline(f"http://{swarm.http}", max_batch_size=AT_A_TIME) as pipe,
    ):
        warm = make_work(BATCH, ROUNDS)
        for local in (one, two):
            local.time_prompts(*warm)
        time_pipeline(pipe, warm)
        for work in rounds:
            tokens = sum(work[1])
            rates["one"].append(tokens / one.time_prompts(*work))
            rates["two"].append(tokens / two.time_prompts(*work))
            rates["pipeline"].append(tokens / time_pipeline(pipe, work))
    return _result(rates)


def make_work(count: int, seed: int) -> Work:
    """Return prompts, and the number of tokens to generate for each."""
    rng = random.Random(seed)
    vocabulary = SHAPES[SHAPE].vocab
    prompts = [
        [rng.randrange(1, vocabulary) for _ in range(rng.randint(*LENGTHS))] for _ in range(count)
    ]
    return prompts, [rng.randint(*NEW) for _ in prompts]


def time_pipeline(pipe: Pipeline, work: Work) -> float:
    """Return the seconds of one call of the pipeline. Each answer must have its tokens."""
    prompts, new = work
    configs = [GenerationConfig(max_new_tokens=count, ignore_eos=True) for count in new]
    began = time.perf_counter()
    responses = pipe(prompts, configs)
    seconds = time.perf_counter() - began
    if [response.generate_token_len for response in responses] != new:
        raise RuntimeError("an answer has another number of tokens than was asked for")
    return seconds


def _result(rates: dict[str, list[float]]) -> Result:
    figures = {f"{name}_tokens_per_second": median(values) for name, values in rates.items()}
    rows = []
    for name, threads in (("one", 1), ("two", 2)):
        pairs = zip(rates["pipeline"], rates[name], strict=True)
        ratios = [pipeline_rate / rate for pipeline_rate, rate in pairs]
        figures["ratio" if threads == 1 else "ratio_two_threads"] = median(ratios)
        rows.append(
            (
                f"{threads}",
                f"{median(rates[name]):.0f}",
                f"{median(rates['pipeline']):.0f}",
                f"{median(ratios):.2f}",
                f"{min(ratios):.2f} .. {max(ratios):.2f}",
            )
        )
    return Result(
        name="pipeline_256",
        figures=figures,
        columns=("generate's threads", "generate tok/s", "pipeline tok/s", "ratio", "over rounds"),
        rows=rows,
        shape=f"Llama 27M fp32, 2 spans, {PROMPTS} prompts of {LENGTHS[0]} to {LENGTHS[1]} tokens, "
        f"{NEW[0]} to {NEW[1]} new, {AT_A_TIME} at a time, generate in batches of {BATCH}",
        threads=1,
        bars=[Bar("ratio", ">=", 1.5)],
    )
