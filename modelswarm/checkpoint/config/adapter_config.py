"""LoRA adapters in peft's format: what adapter_config.json says, and the tensors of adapter_model.safetensors.

Used by the server, which loads the tensors of its own blocks. An adapter that this project would apply in another way
than peft is refused, with the name of the field or the tensor. Knows no torch and no addresses.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from modelswarm.checkpoint.block_tensors import TensorPlan
from modelswarm.checkpoint.config.fields import MAX_VALUE_CHARACTERS, is_positive
from modelswarm.checkpoint.json_files import read_json
from modelswarm.checkpoint.tensor_index import TensorEntry, read_header
from modelswarm.checkpoint.tensor_names import ModelPart, block_of, canonical_name, name_in_block
from modelswarm.errors import UserError

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)

_OBEYED = frozenset({"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"})
_STATED_BY_TENSORS = frozenset(
    {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
)
"""Fields that say which modules have an adapter. The tensors show it; `_check_complete` compares both."""
_ONLY_IN_TRAINING = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "peft_type"),
        *("peft_version", "revision", "task_type", "megatron_config", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
        *("runtime_config", "ensure_weight_tying", "fan_in_fan_out", "init_lora_weights", "bias"),
    }
)
_PLAIN_STARTS = (True, False, "gaussian", "orthogonal", "eva", None)
"""Values of init_lora_weights that leave the model's own weights as they are."""
_STORED = frozenset({"F32", "BF16", "F16"})
_LAYOUT = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_INPUTS_FIRST = frozenset({"gpt2"})
"""Families that store the weight of a projection as [in, out]."""


@dataclass(frozen=True, slots=True)
class Projection:
    """The two tensors that an adapter adds to one projection."""

    block: int
    module: str  # name within the block
    a: str  # stored names
    b: str
    rank: int
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterFacts:
    """One adapter folder, compared with the model."""

    folder: Path
    projections: tuple[Projection, ...]  # of the blocks asked for


def split_modules(plan: TensorPlan, block: int) -> dict[str, tuple[int, int]]:
    """Return the modules of a block that may have an adapter: name -> inputs and outputs."""
    found: dict[str, tuple[int, int]] = {}
    for name, shape in plan.shapes_in(block).items():
        is_expert = ".experts." in name
        if name.endswith(".weight") and len(shape) == 2 and not is_expert:
            sizes = [size for _, size in shape]
            outputs, inputs = reversed(sizes) if plan.family.name in _INPUTS_FIRST else sizes
            found[name.removesuffix(".weight")] = inputs, outputs
    return found


def read_adapter(
    name: str, folder: Path, plan: TensorPlan, part: ModelPart, max_rank: int
) -> AdapterFacts:
    """Read the adapter's headers; UserError if it cannot be served. `name`: that of its clients, for the sentence."""
    field = f"adapters: {name}"
    for file in ADAPTER_FILES:
        if not (folder / file).is_file():
            raise UserError(field, f"{folder} has no {file}; allowed are LoRA adapters of peft")
    config = read_json(folder / CONFIG_FILE)
    _check_config(field, config)
    tensors = read_header(folder, WEIGHTS_FILE)
    try:
        found = _projections(field, config, tensors, plan, part, max_rank)
        _check_complete(field, config, found, plan, part)
    except re.error as error:
        raise UserError(field, f"{CONFIG_FILE} has a pattern that is malformed: {error}") from error
    return AdapterFacts(folder, found)


def adapter_revision(folder: Path) -> str:
    """Return a hash of the configuration and the weights: the servers of a route must have equal ones."""
    digest = hashlib.sha256()
    for file in ADAPTER_FILES:
        with (folder / file).open("rb") as handle:
            digest.update(hashlib.file_digest(handle, "sha256").digest())
    return digest.hexdigest()[:16]


def _check_config(field: str, config: Mapping[str, Any]) -> None:
    """Refuse every field whose effect would be missing."""
    if config.get("peft_type") != "LORA":
        _refuse(field, config, "peft_type", "allowed: 'LORA'")
    if not is_positive(config.get("r")):
        _refuse(field, config, "r", "allowed is a positive integer")
    if config.get("bias", "none") != "none":
        _refuse(field, config, "bias", "allowed: 'none'")
    if config.get("init_lora_weights") not in _PLAIN_STARTS:
        rule = "it changes the model's own weights; convert the adapter first"
        _refuse(field, config, "init_lora_weights", rule)
    _check_numbers(field, config)
    known = _OBEYED | _STATED_BY_TENSORS | _ONLY_IN_TRAINING
    for name, value in config.items():
        if name not in known and value not in (None, False, 0, "", [], {}):
            _refuse(field, config, name, "this server does not do it; leave it out")


def _check_numbers(field: str, config: Mapping[str, Any]) -> None:
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(config.get(name) or {}, dict):
            _refuse(field, config, name, "allowed is an object")
    if not all(map(is_positive, (config.get("rank_pattern") or {}).values())):
        _refuse(field, config, "rank_pattern", "allowed are positive integers")
    for value in (config.get("lora_alpha"), *(config.get("alpha_pattern") or {}).values()):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value):
            _refuse(field, config, "lora_alpha", "allowed are numbers, also in alpha_pattern")


def _refuse(field: str, config: Mapping[str, Any], name: str, rule: str) -> NoReturn:
    shown = repr(config.get(name))
    if len(shown) > MAX_VALUE_CHARACTERS:
        shown = f"{shown[:MAX_VALUE_CHARACTERS]}..."
    raise UserError(field, f"{CONFIG_FILE}: {name} is {shown}; {rule}")


def _projections(
    field: str,
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorEntry],
    plan: TensorPlan,
    part: ModelPart,
    max_rank: int,
) -> tuple[Projection, ...]:
    pairs: dict[tuple[int, str], dict[str, TensorEntry]] = {}
    for stored, entry in tensors.items():
        match = _LAYOUT.fullmatch(stored)
        name = canonical_name(f"{match[1]}.weight") if match else None
        block = None if name is None else block_of(name)
        if match is None or name is None or block is None or block >= part.n_blocks:
            rule = "allowed are lora_A and lora_B of the projections in the model's blocks"
            raise UserError(field, f"{WEIGHTS_FILE} has {stored}; {rule}")
        module = name_in_block(name).removesuffix(".weight")
        pairs.setdefault((block, module), {})[match[2]] = entry
    found = [
        _projection(field, config, key, pair, plan, max_rank) for key, pair in sorted(pairs.items())
    ]
    return tuple(each for each in found if part.first <= each.block < part.last)


def _projection(
    field: str,
    config: Mapping[str, Any],
    key: tuple[int, str],
    pair: Mapping[str, TensorEntry],
    plan: TensorPlan,
    max_rank: int,
) -> Projection:
    block, module = key
    where = f"{module} of block {block}"
    sizes = split_modules(plan, block).get(module)
    if sizes is None:
        allowed = ", ".join(sorted(split_modules(plan, block)))
        raise UserError(field, f"{where} cannot have an adapter; allowed: {allowed}")
    if len(pair) < 2:
        raise UserError(
            field, f"{WEIGHTS_FILE} lacks lora_{'A' if 'B' in pair else 'B'} of {where}"
        )
    a, b = pair["A"], pair["B"]
    if not {a.dtype, b.dtype} <= _STORED:
        raise UserError(field, f"{where} is stored as {a.dtype}; allowed: F32, BF16, F16")
    inputs, outputs = sizes
    path = _module_path(a.stored_name)
    rank = _pattern(config.get("rank_pattern"), path, config["r"])
    if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
        shown = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
        wanted = f"[{rank}, {inputs}] and [{outputs}, {rank}], by the model and r"
        raise UserError(field, f"{where} has {shown}; allowed: {wanted}")
    if rank > max_rank:
        raise UserError(field, f"{where} has rank {rank}; allowed: at most {max_rank} (max rank)")
    alpha = _pattern(config.get("alpha_pattern"), path, config["lora_alpha"])
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Projection(block, module, a.stored_name, b.stored_name, rank, scale)


def _module_path(stored: str) -> str:
    """Return the module's name in peft's model, for its patterns: Gemma 3 with images nests its blocks."""
    match = _LAYOUT.fullmatch(stored)
    assert match is not None
    return match[1]


def _pattern(patterns: Mapping[str, Any] | None, path: str, default: Any) -> Any:
    """Return the value for a module as peft does: the first pattern that its name ends with."""
    for pattern, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return default


def _check_complete(
    field: str,
    config: Mapping[str, Any],
    found: Iterable[Projection],
    plan: TensorPlan,
    part: ModelPart,
) -> None:
    """Refuse an adapter that lacks tensors which its configuration names."""
    layers = config.get("layers_to_transform")
    listed = layers if isinstance(layers, list) else [layers]
    has_all = layers in (None, []) or isinstance(config.get("target_modules"), str)  # as in peft
    present = {(each.block, each.module) for each in found}
    for block in range(part.first, part.last):
        for module in split_modules(plan, block) if has_all or block in listed else ():
            path = f"{plan.family.tables.blocks}.{block}.{module}"
            is_wanted = _names(config.get("target_modules"), path)
            is_wanted = is_wanted and not _names(config.get("exclude_modules"), path)
            if is_wanted and (block, module) not in present:
                detail = f"{WEIGHTS_FILE} has no tensors for {module} of block {block}"
                raise UserError(field, detail)


def _names(modules: Any, path: str) -> bool:
    """Return whether a field of peft's names the module: by a regular expression, or by ends of names."""
    if isinstance(modules, str):
        return re.fullmatch(modules, path) is not None
    return any(path == each or path.endswith(f".{each}") for each in modules or ())
