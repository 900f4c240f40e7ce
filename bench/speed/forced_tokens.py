"""Forced tokens of a grammar in groups: tokens/s of JSON answers, over those with a step for each token.

One swarm of two spans of a random Llama 27M, whose tokenizer was trained on the project's pages. A request that asks
for log probabilities gets no groups, and the same answer. `logprobs_cost` is the share of tokens/s that they cost an
answer without grammar. `ratio` is corrected by it, `raw_ratio` is not.
Both kinds of requests take turns.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.harness import Bar, Result
from bench.models import SHAPES, model_folder
from bench.swarm import NAME, bench_swarm

ROUNDS, SEEDS, FREE_TOKENS = 3, 4, 120
BAR = 1.2
WORD = {"type": "string", "minLength": 3, "maxLength": 10}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": WORD,
        "description": {"type": "string", "minLength": 10, "maxLength": 40},
        "category": {"enum": ["hardware", "software", "service"]},
        "price": {"type": "number", "minimum": 0, "maximum": 1000, "multipleOf": 0.01},
        "in_stock": {"type": "boolean"},
        "tags": {"type": "array", "items": WORD, "minItems": 2, "maxItems": 3},
        "manufacturer": {
            "type": "object",
            "properties": {"name": WORD, "country": WORD},
            "required": ["name", "country"],
            "additionalProperties": False,
        },
    },
    "required": [
        "name", "description", "category", "price", "in_stock", "tags", "manufacturer",
    ],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "product", "schema": SCHEMA}}
GROUPS: dict[str, Any] = {}
SINGLE: dict[str, Any] = {"logprobs": 0}


def run() -> Result:
    with bench_swarm(_folder(), spans=2) as swarm:
        url = f"http://{swarm.http}/v1/completions"
        json_rates = _measure(url, response_format=FORMAT, max_tokens=900)
        free_rates = _measure(url, max_tokens=FREE_TOKENS)
    raw_ratio = json_rates["groups"] / json_rates["single"]
    cost = 1 - free_rates["single"] / free_rates["groups"]
    figures = {
        "ratio": raw_ratio * (1 - max(0.0, cost)),
        "raw_ratio": raw_ratio,
        "groups_tokens_s": json_rates["groups"],
        "single_tokens_s": json_rates["single"],
        "logprobs_cost": cost,
    }
    return Result(
        name="forced_tokens",
        figures=figures,
        columns=("answers", "groups tok/s", "single tok/s", "ratio", "cost of logprobs"),
        rows=[
            (
                str(2 * ROUNDS * SEEDS),
                f"{figures['groups_tokens_s']:.1f}",
                f"{figures['single_tokens_s']:.1f}",
                f"{figures['ratio']:.2f}",
                f"{figures['logprobs_cost']:.1%}",
            )
        ],
        shape="Llama 27M fp32, 2 spans, 1 stream, JSON of 7 properties",
        threads=1,
        bars=[Bar("ratio", ">=", BAR)],
    )


def _measure(url: str, **fields: Any) -> dict[str, float]:
    """Return the median tokens/s of answers with groups and of those without. Both must be the same answers."""
    rates: dict[str, list[float]] = {"groups": [], "single": []}
    for number in range(ROUNDS + 1):
        for seed in range(SEEDS):
            texts = set()
            kinds = [("groups", GROUPS), ("single", SINGLE)]
            for kind, more in kinds if number % 2 else reversed(kinds):
                text, rate = _ask(url, {**fields, **more, "seed": seed})
                texts.add(text)
                if number:  # the first round warms up
                    rates[kind].append(rate)
            if len(texts) > 1:
                raise RuntimeError(f"two answers for seed {seed}: {texts}")
    return {kind: statistics.median(found) for kind, found in rates.items()}


def _ask(url: str, fields: dict[str, Any]) -> tuple[str, float]:
    """Return the text of an answer, and its tokens/s."""
    body = {"model": NAME, "prompt": "A product:", "temperature": 1, **fields}
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=300) as answer:
        made = json.load(answer)
    seconds = time.perf_counter() - began
    return made["choices"][0]["text"], made["usage"]["completion_tokens"] / seconds


def _folder() -> Path:
    """Return the model's folder with a byte-level BPE tokenizer in place of its own; make it if it is missing."""
    source = model_folder("27m")
    folder = source.with_name(source.name + "-json")
    if not (folder / "tokenizer_config.json").exists():
        shutil.copytree(source, folder, dirs_exist_ok=True)
        _train_tokenizer(folder)
    return folder


def _train_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    end = "<|end|>"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SHAPES["27m"].vocab,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    tokenizer.train([str(page) for page in pages], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
