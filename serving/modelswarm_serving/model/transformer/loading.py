"""Builds the part of a Hugging Face model that a span needs, and reads only its tensors.

A subclass of the model's class drops in `__init__` what the span does not own. So `from_pretrained` (which builds on
the meta device) never allocates it. The state dict holds lazy safetensors slices. Called by `startup.load_span`;
`self_check.py` checks the outcome. Knows nothing of pages or steps.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import logging

from modelswarm.checkpoint.tensor_index import read_tensors
from modelswarm.checkpoint.tensor_names import ModelPart
from modelswarm.errors import ModelSourceError
from modelswarm_serving.model.attention.attention import ATTENTION_NAME
from modelswarm_serving.model.transformer.read_counter import CountedSlice, OnBytes, ReadCounter


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """The modules of one span; None for those that the span does not need."""

    config: PreTrainedConfig  # cut to the span's blocks
    body: nn.Module  # the base model: rope and `layers`, its final norm is the identity
    embed: nn.Module | None
    norm: nn.Module | None
    head: Tensor | None  # [hidden, vocab]
    softcap: float | None  # of the logits

    @property
    def head_dim(self) -> int:
        config = self.config
        given = getattr(config, "head_dim", None)
        return int(given or config.hidden_size // config.num_attention_heads)


def load_modules(
    folder: Path,
    part: ModelPart,
    dtype: torch.dtype,
    device: torch.device,
    on_bytes: OnBytes = lambda done, total: None,
) -> LoadedSpan:
    """Load the blocks and the modules of head or tail; every fault of the folder is a ModelSourceError.

    `on_bytes`: told the bytes read so far and all bytes to read, from any thread.
    """
    config = _text_config(folder)
    config.tie_word_embeddings = part.tied
    slices = _lazy_slices(folder, part, on_bytes)
    span_class = _trimmed_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], part)
    # transformers would report on stderr the faults that are raised below in one sentence
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        model, info = span_class.from_pretrained(
            None,
            config=config,
            state_dict=slices,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:  # transformers and safetensors have no common base
        raise _unloadable(folder, error) from error
    if info["missing_keys"]:
        names = ", ".join(sorted(info["missing_keys"])[:4])
        raise ModelSourceError("model", f"{folder} lacks weights for {names}")
    if info["mismatched_keys"]:
        name, found, expected = min(info["mismatched_keys"])
        raise ModelSourceError(
            "model",
            f"{folder} has {name} of shape {tuple(found)}; config.json has {tuple(expected)}",
        )
    return _split_modules(model.eval().requires_grad_(False).to(device), part)


def _text_config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validation raises several kinds without a common base
        raise ModelSourceError("model", f"{folder / 'config.json'} is refused: {error}") from error
    text: PreTrainedConfig = getattr(config, "text_config", None) or config
    return copy.deepcopy(text)


def _lazy_slices(folder: Path, part: ModelPart, on_bytes: OnBytes) -> dict[str, Any]:
    """Return canonical name -> lazy slice for the needed names only, so that other shards need not exist."""
    entries = read_tensors(folder, part.needs_tensor)
    files = {entry.file for entry in entries.values()}
    counter = ReadCounter(sum(entry.size for entry in entries.values()), on_bytes)
    try:
        handles: dict[str, Any] = {file: safe_open(folder / file, framework="pt") for file in files}
        return {
            name: CountedSlice(handles[entry.file].get_slice(entry.stored_name), counter)
            for name, entry in entries.items()
        }
    except (SafetensorError, OSError) as error:
        raise _unloadable(folder, error) from error


def _unloadable(folder: Path, error: Exception) -> ModelSourceError:
    return ModelSourceError("model", f"{folder} cannot be loaded: {type(error).__name__}: {error}")


def _trimmed_class(base: Any, part: ModelPart) -> Any:
    """Return a subclass of `base` without the modules that the part does not need.

    Placeholders keep absolute indices, so that names match and per-block choices come from the whole configuration.
    """

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        base.__init__(self, config)
        for index in range(part.n_blocks):
            if not part.first <= index < part.last:
                self.model.layers[index] = nn.Identity()
        if not part.is_tail:
            self.model.norm = nn.Identity()
            self.lm_head = nn.Identity()
        if not part.needs_embedding:
            self.model.embed_tokens = nn.Identity()

    ties = base._tied_weights_keys if part.tied and part.is_tail else {}
    # transformers judges attention support by the module of the class
    members = {"__init__": __init__, "__module__": base.__module__, "_tied_weights_keys": ties}
    return type(f"Span{base.__name__}", (base,), members)


def _split_modules(model: Any, part: ModelPart) -> LoadedSpan:
    body = model.model
    owned = list(body.layers[part.first : part.last])
    for module in body.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= part.first
    body.layers = nn.ModuleList(owned)
    config = body.config
    config.num_hidden_layers = len(owned)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[part.first : part.last]
    norm, body.norm = body.norm, nn.Identity()
    embed, body.embed_tokens = body.embed_tokens, nn.Identity()
    return LoadedSpan(
        config=config,
        body=body,
        embed=embed if part.is_head else None,
        norm=norm if part.is_tail else None,
        head=_head_weight(model.lm_head.weight, part) if part.is_tail else None,
        softcap=getattr(config, "final_logit_softcapping", None),
    )


def _head_weight(weight: Tensor, part: ModelPart) -> Tensor:
    """Return the head's weight in the layout of `fusion.py`, unless that would copy the embedding a second time."""
    shared = part.tied and part.is_head
    return weight.t() if shared else weight.t().contiguous()
