"""LoRA adapters of small models, written by peft, and what peft makes of them on the whole model."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.models.tiny_models import EOS, load_whole


def make_adapter(
    model: Path, folder: Path, *, seed: int = 1, rank: int = 4, alpha: int = 16, **options: Any
) -> Path:
    """Write a random adapter of all projections in the model's blocks; `options` are those of peft's LoraConfig."""
    import torch
    from peft import LoraConfig, get_peft_model

    whole = load_whole(model)
    options.setdefault("target_modules", projections(whole))
    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, task_type="CAUSAL_LM", init_lora_weights=False, **options
    )
    with _quiet_peft():
        get_peft_model(whole, config).save_pretrained(str(folder))
    return folder


@contextmanager
def _quiet_peft() -> Iterator[None]:
    """Let peft use what transformers has deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def projections(whole: Any) -> list[str]:
    """Return the names of the projections in the blocks, without the one that only its weight is used of."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    names = set()
    for name, module in whole.named_modules():
        inner = re.fullmatch(r".*?\.\d+\.(.+)", name)
        if inner and isinstance(module, nn.Linear | Conv1D) and ".experts." not in name:
            names.add(inner[1])
    has_experts = any(".experts" in name for name, _ in whole.named_modules())
    # peft turns the names of a dense block into those of the experts, if there are any.
    names = {name for name in names if not has_experts or "attn" in name}
    return sorted(name for name in names if not name.endswith("kv_b_proj"))


def load_with(model: Path, adapter: Path | None) -> Any:
    """Return the whole model, with the adapter as peft applies it."""
    from peft import PeftModel

    whole: Any = load_whole(model)
    if adapter is None:
        return whole
    with _quiet_peft():
        return PeftModel.from_pretrained(whole, str(adapter)).eval()


def generate_with(
    model: Path, adapter: Path | None, prompts: Sequence[Sequence[int]], new: int
) -> list[list[int]]:
    """Return each prompt with what greedy `generate` of peft's whole model adds to it."""
    import torch

    whole = load_with(model, adapter)
    return [
        whole.generate(
            input_ids=torch.tensor([list(prompt)]),
            do_sample=False,
            max_new_tokens=new,
            pad_token_id=EOS,
        )[0].tolist()
        for prompt in prompts
    ]
