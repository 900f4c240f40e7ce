"""Builds the part of a Hugging Face model that a span needs, and reads only its tensors.

A subclass of the model's class drops in `__init__` what the span does not own. So `from_pretrained` (which builds on
the meta device) never allocates it. The state dict holds lazy safetensors slices. Called by `startup.load_span`;
`self_check.py` checks the outcome. Knows nothing of pages or steps.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils import logging

from modelswarm.checkpoint.block_tensors import STORED_DTYPES
from modelswarm.checkpoint.families.family import Family, Tables
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.tensor_index import read_tensors
from modelswarm.checkpoint.tensor_names import ModelPart
from modelswarm.errors import ModelSourceError
from modelswarm_serving.model.linear.weight import Weight
from modelswarm_serving.model.transformer.mxfp4 import with_unpacked
from modelswarm_serving.model.transformer.own_attention import adapt_attention, attention_name
from modelswarm_serving.model.transformer.read_counter import CountedSlice, OnBytes, ReadCounter

EXPERTS = "grouped_mm"
"""transformers' way to run experts. Its loop over experts waits for the device. Measured with 32 experts, 4 per row, 4
layers and 1 / 8 / 32 rows, the loop took 9.7 / 41 / 60 ms. `grouped_mm` took 9.0 / 26 / 48 ms."""
_ALIGNMENT = 16
"""Bytes of which each row of its operands must be a multiple."""
_EXPERTS_NAME = ".experts."
"""Part of the names of all tensors of experts."""
_NO_THREADS = "HF_DEACTIVATE_ASYNC_LOAD"
"""Variable that transformers reads when it loads a model: 1 lets it read in the loading thread."""
_COMPARED_ROWS = 4096
"""Rows of two tables that are compared at once."""


@dataclass(frozen=True, slots=True)
class Embedding:
    """Turns tokens into rows: all that the model's forward does before its first block."""

    tokens: nn.Module
    positions: Tensor | None  # of learned positions, [positions + offset, hidden]
    offset: int
    norm: nn.Module | None
    scale: float

    def __call__(
        self, tokens: Tensor, positions: Tensor, given: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Return a row for each token. `given`: places, and the rows there in place of the tokens' embeddings."""
        rows: Tensor = self.tokens(tokens)
        if given is not None:
            rows = rows.index_copy(0, *given)
        if self.scale != 1.0:
            rows = rows * self.scale
        if self.positions is not None:
            rows = rows + self.positions[positions + self.offset]
        return rows if self.norm is None else self.norm(rows)


@dataclass(frozen=True, slots=True)
class LoadedSpan:
    """The modules of one span; None for those that the span does not need."""

    family: Family
    config: PreTrainedConfig  # cut to the span's blocks
    body: nn.Module  # the base model: rope and blocks, the modules around the blocks change nothing
    embed: Embedding | None
    norm: nn.Module | None
    head: Weight | None  # in the layout of the checkpoint
    softcap: float | None  # of the logits
    logit_scale: float

    def kv_shape(self, elements: int) -> tuple[int, int, int]:
        """Return parts, heads and size of the KV of one position, which has this many elements."""
        if self.family.is_latent:
            return 1, 1, elements
        config = self.config
        given = getattr(config, "head_dim", None)
        size = int(given or config.hidden_size // config.num_attention_heads)
        return 2, elements // 2 // size, size

    @property
    def blocks_name(self) -> str:
        """Name of the list of blocks in `body`."""
        return self.family.tables.blocks.rpartition(".")[2]


class _NoPositions(nn.Module):
    """In place of a table of learned positions: `Embedding` adds them, and only where tokens enter."""

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return torch.zeros(())


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
    family = FAMILIES[config.model_type]
    slices = with_unpacked(_lazy_slices(folder, part, dtype, on_bytes))
    if family.quantisation and hasattr(config, "quantization_config"):
        del config.quantization_config  # `mxfp4.py` reads it
    span_class = _trimmed_class(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], part)
    # transformers would report on stderr the faults that are raised below in one sentence
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with _bounded_reading(slices, dtype):
            model, info = span_class.from_pretrained(
                None,
                config=config,
                state_dict=slices,
                dtype=dtype,
                attn_implementation=attention_name(family),
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **(
                    {"experts_implementation": _experts_way(config, dtype)}
                    if family.experts
                    else {}
                ),
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
    return _split_modules(model.eval().requires_grad_(False).to(device), part, family)


def _experts_way(config: PreTrainedConfig, dtype: torch.dtype) -> str:
    """Return `EXPERTS`, or the loop for experts of sizes that its kernel refuses."""
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    is_aligned = all(
        size * dtype.itemsize % _ALIGNMENT == 0 for size in (config.hidden_size, inner)
    )
    return EXPERTS if is_aligned else "eager"


@contextmanager
def _bounded_reading(slices: Mapping[str, Any], dtype: torch.dtype) -> Iterator[None]:
    """Let transformers read one tensor after another if it converts experts, which it joins afterwards.

    Its threads convert all tensors ahead. Measured with 8 blocks of 195 MiB in float32, stored in bfloat16: 1,250 MiB
    beside the weights, and 140 MiB one after another. Tensors that are not converted are parts of a mapped file.
    """
    stored = {each.get_dtype() for name, each in slices.items() if _EXPERTS_NAME in name}
    is_converted = any(getattr(torch, STORED_DTYPES[each]) is not dtype for each in stored)
    before = os.environ.get(_NO_THREADS)
    if is_converted:
        os.environ[_NO_THREADS] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NO_THREADS, None)
        else:
            os.environ[_NO_THREADS] = before


def _text_config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validation raises several kinds without a common base
        raise ModelSourceError("model", f"{folder / 'config.json'} is refused: {error}") from error
    text: PreTrainedConfig = copy.deepcopy(getattr(config, "text_config", None) or config)
    # Forms of the output for callers in Python: a tuple, or the rows and scores of all blocks beside it.
    text.return_dict, text.output_hidden_states, text.output_attentions = True, False, False
    return text


def _lazy_slices(
    folder: Path, part: ModelPart, dtype: torch.dtype, on_bytes: OnBytes
) -> dict[str, Any]:
    """Return canonical name -> lazy slice for the needed names only, so that other shards need not exist."""
    entries = read_tensors(folder, part.needs_tensor)
    files = {entry.file for entry in entries.values()}
    twin = entries.pop(part.twin, None) if part.twin is not None else None
    counter = ReadCounter(sum(entry.size for entry in entries.values()), on_bytes)
    try:
        handles: dict[str, Any] = {file: safe_open(folder / file, framework="pt") for file in files}
        if twin is not None:
            embedding = entries[part.tables.embedding]
            stored = (
                handles[entry.file].get_slice(entry.stored_name) for entry in (embedding, twin)
            )
            _check_twins(folder, part, dtype, *stored)
        return {
            name: CountedSlice(handles[entry.file].get_slice(entry.stored_name), counter)
            for name, entry in entries.items()
        }
    except (SafetensorError, OSError) as error:
        raise _unloadable(folder, error) from error


def _check_twins(
    folder: Path, part: ModelPart, dtype: torch.dtype, embedding: Any, head: Any
) -> None:
    """Refuse a stored head that is not the embedding to which it is tied: transformers would use the head."""
    for start in range(0, embedding.get_shape()[0], _COMPARED_ROWS):
        rows = slice(start, start + _COMPARED_ROWS)
        if not torch.equal(embedding[rows].to(dtype), head[rows].to(dtype)):
            raise ModelSourceError(
                "model",
                f"{folder}: tie_word_embeddings is true, by config.json or by default, but {part.tables.head} and "
                f"{part.tables.embedding} differ; allowed is false, or a checkpoint without {part.tables.head}",
            )


def _unloadable(folder: Path, error: Exception) -> ModelSourceError:
    return ModelSourceError("model", f"{folder} cannot be loaded: {type(error).__name__}: {error}")


def _trimmed_class(base: Any, part: ModelPart) -> Any:
    """Return a subclass of `base` without the modules that the part does not need.

    Placeholders keep absolute indices, so that names match and per-block choices come from the whole configuration.
    """

    tables = part.tables

    def __init__(self: Any, config: PreTrainedConfig) -> None:
        base.__init__(self, config)
        blocks = self.get_submodule(tables.blocks)
        for index in range(part.n_blocks):
            if not part.first <= index < part.last:
                blocks[index] = nn.Identity()
        if not part.is_tail:
            self.set_submodule(_module_of(tables.norm[0]), nn.Identity())
            self.set_output_embeddings(nn.Identity())
        if not part.needs_embedding:
            self.set_submodule(_module_of(tables.embedding), nn.Identity())
        if not part.is_head:
            _drop_entrance(self, tables)

    ties = base._tied_weights_keys if part.tied and part.is_tail else {}
    # transformers judges attention support by the module of the class, and renames tensors by the name of the class
    members = {"__init__": __init__, "__module__": base.__module__, "_tied_weights_keys": ties}
    return type(base.__name__, (base,), members)


def _split_modules(model: Any, part: ModelPart, family: Family) -> LoadedSpan:
    tables = family.tables
    path, _, blocks = tables.blocks.rpartition(".")
    body = model.get_submodule(path)
    owned = list(getattr(body, blocks)[part.first : part.last])
    for module in body.modules():
        if hasattr(module, "layer_idx"):
            module.layer_idx -= part.first
    setattr(body, blocks, nn.ModuleList(owned))
    adapt_attention(family, owned, body.config)
    config = body.config
    config.num_hidden_layers = len(owned)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[part.first : part.last]
    norm = model.get_submodule(_module_of(tables.norm[0]))
    model.set_submodule(_module_of(tables.norm[0]), nn.Identity())
    head = None
    if part.is_tail:
        shared = part.tied and part.is_head  # with the embedding
        head = Weight(model.get_output_embeddings().weight, is_shared=shared)
    return LoadedSpan(
        family=family,
        config=config,
        embed=_take_embedding(model, body, part),
        body=body,
        norm=norm if part.is_tail else None,
        head=head,
        softcap=_own_field(config, "final_logit_softcapping", None),
        logit_scale=_logit_scale(config),
    )


def _take_embedding(model: Any, body: Any, part: ModelPart) -> Embedding | None:
    """Return all that turns tokens into rows, and leave in the model what changes nothing."""
    tables = part.tables
    tokens = model.get_submodule(_module_of(tables.embedding))
    model.set_submodule(_module_of(tables.embedding), nn.Identity())
    scale = float(
        getattr(body, "embedding_multiplier", 1.0)
    )  # Granite's forward applies it to rows
    body.embedding_multiplier = 1.0
    if not part.is_head:
        return None
    table = model.get_submodule(_module_of(tables.positions)).weight if tables.positions else None
    norm = (
        model.get_submodule(_module_of(tables.embedding_norm[0])) if tables.embedding_norm else None
    )
    _drop_entrance(model, tables)
    offset = 0 if table is None else len(table) - body.config.max_position_embeddings
    return Embedding(tokens, table, offset, norm, scale)


def _drop_entrance(model: Any, tables: Tables) -> None:
    """Put modules without effect in place of those that a model applies to rows before its first block."""
    if tables.positions is not None:
        model.set_submodule(_module_of(tables.positions), _NoPositions())
    if tables.embedding_norm:
        model.set_submodule(_module_of(tables.embedding_norm[0]), nn.Identity())


def _module_of(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor of the logits: Cohere multiplies, Granite divides, the others do neither."""
    scale, divisor = [_own_field(config, name, 1.0) for name in ("logit_scale", "logits_scaling")]
    return float(scale) / float(divisor)


def _own_field(config: PreTrainedConfig, name: str, default: Any) -> Any:
    """Return a field that the family has. transformers keeps the others of config.json too, and no class reads them."""
    return getattr(config, name) if name in type(config).__dataclass_fields__ else default
