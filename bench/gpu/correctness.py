"""Tokens of every family on the GPU against the whole model on the CPU in float32.

Two spans of a small random model generate greedily, with prompts in chunks and steps of mixed rows. The log of each
stream is then run through the whole model in one piece. Each token is that model's best one, unless the margin of the
best two logits is within the tolerance of the dtype.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.report import Outcome

if TYPE_CHECKING:
    from modelswarm_serving.model.transformer.startup import SpanOptions

TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.3}
"""Largest margin of a token that may differ, in logits, whose standard deviation is 1.6 in these models. The weights
are rounded to the dtype on both sides, so that only the arithmetic differs. On a CPU tokens differed up to a margin of
0.16 in bfloat16 (3 families, 768 tokens), and none in float16."""
PROMPTS = (13, 5, 21, 1, 33, 8, 2, 17)
NEW = 32


@dataclass(slots=True)
class Tally:
    tokens: int = 0
    near_ties: int = 0  # tokens whose margin is within the tolerance
    differing: int = 0  # near ties that are another token
    wrong: int = 0  # other tokens that are no near ties


def check_families() -> Outcome:
    """Check every family in every dtype on the GPU."""
    from support.models.tiny_models import TINY

    from modelswarm_serving.model.device import TorchDrivers, find_device
    from modelswarm_serving.model.transformer.startup import SpanOptions

    device = find_device("cuda", TorchDrivers())
    outcome = Outcome(figures={"wrong": 0.0, "tokens": 0.0})
    for family in TINY:
        for dtype, tolerance in TOLERANCES.items():
            options = SpanOptions(
                dtype=dtype,
                device=device,
                attention="triton",
                pages=256,
                page_size=4,
                graph_rows=16,
            )
            tally = check_family(family, options, tolerance)
            outcome.figures["wrong"] += tally.wrong
            outcome.figures["tokens"] += tally.tokens
            measured = (
                f"{tally.tokens} tokens, {tally.near_ties} near ties, "
                f"{tally.differing} of them differ, {tally.wrong} wrong"
            )
            case = f"{family} {dtype}"
            outcome.rows.append(("correctness", case, measured, f"margin {tolerance:g}", ""))
    return outcome


def check_family(family: str, options: SpanOptions, tolerance: float) -> Tally:
    """Generate with two spans and these options, and judge every token by the whole model."""
    import torch
    from support.models.chain import Stream, load_chain
    from support.models.tiny_models import VOCAB, load_whole, make_model

    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), family)
        round_weights(folder, options.dtype)
        chain = load_chain(folder, (0, 2, 4), options=options, seed=3)
        model = load_whole(folder)
        tally = Tally()
        for chunk in (16, 64):
            streams = [Stream(prompt) for prompt in prompts]
            chain.generate(streams, NEW, chunk=chunk)
            for stream in streams:
                judge(model, stream.log, len(stream.picked), tolerance, tally)
            chain = load_chain(folder, (0, 2, 4), options=replace(options, graph_rows=0), seed=3)
    return tally


def round_weights(folder: Path, dtype: str) -> None:
    """Round the weights of a folder to the dtype, and leave them in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        rounded = {name: t.to(getattr(torch, dtype)).float() for name, t in tensors.items()}
        save_file(rounded, file, metadata={"format": "pt"})


def judge(model: Any, log: list[int], new: int, tolerance: float, tally: Tally) -> None:
    """Compare the last `new` tokens of the log with the best tokens of the model."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([log])).logits[0]
    best = torch.topk(logits, 2, dim=-1)
    for position in range(len(log) - new, len(log)):
        first, second = best.values[position - 1].tolist()
        is_other = log[position] != int(best.indices[position - 1, 0])
        is_near = first - second <= tolerance
        tally.tokens += 1
        tally.near_ties += is_near
        tally.differing += is_near and is_other
        tally.wrong += is_other and not is_near
