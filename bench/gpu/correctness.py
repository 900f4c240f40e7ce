"""Tokens of every family on the GPU against the whole model on the CPU in float32.

Two spans of a small random model generate greedily, with prompts in chunks and steps of mixed rows. The log of each
stream is then run through the whole model in one piece. Each token is that model's best one, unless the margin of the
best two logits is within the tolerance of the dtype. Rounding may also choose another expert for a row, which moves
logits by any amount. So a mixture of experts may have a number of wrong tokens: transformers' own forward in the dtype
has them too.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.report import FIRST, Table
from bench.gpu.speed import NOT_CAPTURED, lacks_graphs

if TYPE_CHECKING:
    from modelswarm_serving.model.transformer.startup import SpanOptions

TOLERANCES = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.3}
"""Largest margin of a token that may differ, in logits, whose standard deviation is 1.6 in these models. The weights
are rounded to the dtype on both sides, so that only the arithmetic differs. On a CPU tokens differed up to a margin of
0.16 in bfloat16 (3 families, 768 tokens), and none in float16."""
EXPERTS_FACTOR, EXPERTS_SLACK = 3, 3
"""A mixture in 16 bits may have so many times the wrong tokens of transformers' own forward, and so many more. On a
CPU, of 384 tokens in bfloat16 GPT-OSS had 20 wrong ones (transformers 16), DeepSeek V3 6 (12) and Mixtral 7 (4)."""
PROMPTS = (13, 5, 21, 1, 33, 8, 2, 17)
NEW = 32


@dataclass(slots=True)
class Tally:
    tokens: int = 0
    near_ties: int = 0  # tokens whose margin is within the tolerance
    differing: int = 0  # near ties that are another token
    wrong: int = 0  # other tokens that are no near ties
    usual: int = 0  # those that transformers' own forward in the dtype has on the same logs
    may_flip: bool = False  # a mixture in 16 bits: rounding may choose other experts
    lacks_graphs: bool = False  # decode steps ran eagerly that should have been captured

    @property
    def excess(self) -> int:
        """Wrong tokens beyond those that other experts explain."""
        allowed = EXPERTS_FACTOR * self.usual + EXPERTS_SLACK if self.may_flip else 0
        return max(0, self.wrong - allowed)


def check_first(table: Table, family: str) -> None:
    """Check a family that many models are of, in the dtype that most are served in."""
    check_families(table, (family,), ("bfloat16",))


def check_rest(table: Table) -> None:
    """Check all that `check_first` leaves for the families of `FIRST`."""
    from support.models.tiny_models import TINY

    check_families(table, FIRST, ("float16", "float32"))
    check_families(table, [family for family in TINY if family not in FIRST], tuple(TOLERANCES))


def check_families(table: Table, families: Sequence[str], dtypes: Sequence[str]) -> None:
    """Check these families in these dtypes on the GPU."""
    from modelswarm_serving.model.device import TorchDrivers, find_device
    from modelswarm_serving.model.transformer.startup import SpanOptions

    options = SpanOptions(
        device=find_device("cuda", TorchDrivers()),
        attention_backend="triton",
        pages=256,
        page_size=4,
        graph_rows=16,
    )
    for family in families:
        for dtype in dtypes:
            add_family(table, family, replace(options, dtype=dtype))


def add_family(table: Table, family: str, options: SpanOptions) -> None:
    """Check a family with these options; add a row with the result or the fault."""
    case, tolerance = f"{family} {options.dtype}", TOLERANCES[options.dtype]
    with table.case("correctness", case):
        tally = check_family(family, options, tolerance)
        table.count("wrong", tally.excess)
        table.count("tokens", tally.tokens)
        measured = (
            f"{tally.tokens} tokens, {tally.near_ties} near ties, "
            f"{tally.differing} of them differ, {tally.wrong} wrong"
        )
        if tally.may_flip:
            measured += f" ({tally.usual} by transformers' own forward)"
        table.add("correctness", case, measured, f"margin {tolerance:g}", "")
        if tally.lacks_graphs:
            raise RuntimeError(NOT_CAPTURED)


def check_family(family: str, options: SpanOptions, tolerance: float) -> Tally:
    """Generate with two spans and these options, then without captured steps; judge every token by the whole model."""
    import torch
    from support.models.chain import Stream, load_chain
    from support.models.tiny_models import FUSED, VOCAB, load_whole, make_model

    from modelswarm.checkpoint.families.table import FAMILIES

    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = make_model(Path(name), family)
        round_weights(folder, options.dtype)
        model = load_whole(folder)
        has_experts = bool(FAMILIES[model.config.model_type].experts)
        tally.may_flip = has_experts and options.dtype != "float32"
        rounded = load_whole(folder).to(getattr(torch, options.dtype)) if tally.may_flip else None
        eager = replace(options, enforce_eager=not options.device.is_cpu)
        for chunk, chosen in ((16, options), (64, eager)):
            chain = load_chain(folder, (0, 2, 4), options=chosen, seed=3)
            if family in FUSED:
                tally.lacks_graphs |= any(lacks_graphs(span, chosen) for span in chain.spans)
            streams = [Stream(prompt) for prompt in prompts]
            chain.generate(streams, NEW, chunk=chunk)
            for stream in streams:
                judge(model, stream.log, len(stream.picked), tolerance, tally, rounded)
    return tally


def round_weights(folder: Path, dtype: str) -> None:
    """Round the weights of a folder to the dtype, and leave them in float32."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        rounded = {name: t.to(getattr(torch, dtype)).float() for name, t in tensors.items()}
        save_file(rounded, file, metadata={"format": "pt"})


def judge(
    model: Any, log: list[int], new: int, tolerance: float, tally: Tally, rounded: Any = None
) -> None:
    """Compare the last `new` tokens of the log with the best tokens of the model, and those of `rounded`, if given."""
    import torch

    entries, judged = torch.tensor([log]), slice(len(log) - new - 1, len(log) - 1)
    with torch.inference_mode():
        best = torch.topk(model(entries).logits[0, judged], 2, dim=-1)
        usual = None if rounded is None else rounded(entries).logits[0, judged].argmax(-1)
    is_other = torch.tensor(log[len(log) - new :]) != best.indices[:, 0]
    is_near = best.values[:, 0] - best.values[:, 1] <= tolerance
    tally.tokens += new
    tally.near_ties += int(is_near.sum())
    tally.differing += int((is_near & is_other).sum())
    tally.wrong += int((is_other & ~is_near).sum())
    if usual is not None:
        tally.usual += int(((usual != best.indices[:, 0]) & ~is_near).sum())
