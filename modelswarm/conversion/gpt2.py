"""State dicts of a GPT-2 shape as model folders: transformers' own, nanoGPT's, minGPT's.

Sizes come from the shapes of the tensors. What no shape shows comes from the file's settings or from the caller, and is
never guessed. `torch.nn.Linear` has the transpose of GPT-2's weights. Writes one safetensors file.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from modelswarm.checkpoint.facts import read_facts
from modelswarm.checkpoint.tensor_index import SINGLE_FILE
from modelswarm.checkpoint.tokenizer import TOKENIZER_FILE, check_tokenizer
from modelswarm.conversion.state_file import FIELD, StateFile
from modelswarm.errors import ModelSourceError, UserError

ACTIVATIONS = ("gelu_new", "gelu", "relu")
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_HEADS = ("n_head", "num_attention_heads", "n_heads")
_COPIED = (
    "activation_function",
    "layer_norm_epsilon",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "reorder_and_upcast_attn",
)
"""Settings of transformers' GPT2Config that change the numbers and that no tensor shows."""
_BUFFER = re.compile(r"h\.\d+\.attn\.(bias|masked_bias)")
_BLOCK = re.compile(r"h\.(\d{1,4})\..+")
_MATRICES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
_NORMS = ("ln_1", "ln_2")
_HEAD, _TOKENS, _POSITIONS = "lm_head.weight", "wte.weight", "wpe.weight"
_FIRST = "h.0.attn.c_attn.weight"
_TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True)
class Gpt2Model:
    """A model that can be written."""

    config: Mapping[str, Any]  # content of config.json
    tensors: Mapping[str, Tensor]  # by transformers' names


def convert_gpt2(file: StateFile, heads: int | None, activation: str | None) -> Gpt2Model:
    """Return the model of a state dict. Raise UserError for another shape, or for what is not known.

    `heads`, `activation`: number of heads and function of the blocks, if the file's settings do not say them.
    """
    tensors = _without_buffers(file.tensors)
    dtype = _common_dtype(tensors)
    is_transposed = _is_transposed(tensors)
    if is_transposed:
        for name in tensors:
            if name.removesuffix(".weight").endswith(_MATRICES):
                tensors[name] = tensors[name].T
    sizes = _read_sizes(tensors)
    wanted = _wanted_shapes(sizes)
    if not any(name.endswith(".bias") for name in tensors):  # nanoGPT's bias=False
        tensors |= {
            name: torch.zeros(shape, dtype=dtype)
            for name, shape in wanted.items()
            if name.endswith(".bias")
        }
    head = tensors.pop(_HEAD, tensors.get(_TOKENS))
    assert head is not None
    _check_shapes({**tensors, _HEAD: head}, {**wanted, _HEAD: wanted[_TOKENS]})
    is_tied = torch.equal(head, tensors[_TOKENS])
    settings = {name: file.settings[name] for name in _COPIED if name in file.settings}
    _check_plain(settings)
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "layer_norm_epsilon": 1e-5,
        **sizes,
        **settings,
        "n_head": _heads(file.settings, heads, sizes["n_embd"]),
        "activation_function": _activation(settings, activation, is_transposed=is_transposed),
        "tie_word_embeddings": is_tied,
        "dtype": _DTYPES[dtype],
        "bos_token_id": None,  # the tokenizer says which tokens begin and end a text
        "eos_token_id": None,
    }
    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    return Gpt2Model(config, named if is_tied else {**named, _HEAD: head})


def write_model(model: Gpt2Model, folder: Path, tokenizer: Path | None = None) -> None:
    """Write a model folder, whole or not at all. Raise UserError if there is something else, or for the tokenizer.

    `tokenizer`: a folder whose tokenizer is copied.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("FOLDER", f"{folder} exists; allowed: a new or an empty folder")
    if tokenizer is not None:
        check_tokenizer(tokenizer, model.config["vocab_size"])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as made:
            part = Path(made) / "model"
            part.mkdir()
            (part / "config.json").write_text(
                json.dumps(model.config, indent=2) + "\n", encoding="utf-8"
            )
            tensors = {name: each.contiguous().clone() for name, each in model.tensors.items()}
            save_file(tensors, part / SINGLE_FILE, metadata={"format": "pt"})
            for name in _TOKENIZER_FILES:
                if tokenizer is not None and (tokenizer / name).is_file():
                    shutil.copyfile(tokenizer / name, part / name)
            _check_written(part)
            part.replace(folder)
    except OSError as error:
        raise UserError("FOLDER", f"{folder} cannot be written: {error.strerror}") from error
    except SafetensorError as error:  # also of a full disk
        raise UserError("FOLDER", f"{folder} cannot be written: {error}") from error


def _check_written(folder: Path) -> None:
    """Refuse settings of the file with which no server would take the model."""
    try:
        read_facts(folder)
    except ModelSourceError as error:
        message = error.message.replace(f"{folder}/", "")
        raise UserError(FIELD, f"its model cannot be served: {message}") from error


def _matrix(tensors: Mapping[str, Tensor], name: str) -> tuple[int, int]:
    """Return the two sizes of a tensor."""
    found = tensors.get(name)
    if found is None:
        raise UserError(FIELD, f"has no tensor {name}; allowed: a GPT-2 shape")
    if found.dim() != 2:
        raise UserError(FIELD, f"{name} has the shape {list(found.shape)}; allowed: a matrix")
    return found.shape[0], found.shape[1]


def _without_buffers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights by their names inside of `transformer`."""
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        short = name.removeprefix("transformer.")
        if short in found:
            raise UserError(
                FIELD, f"has {short} twice, also as {name}; allowed: one of each tensor"
            )
        if not _BUFFER.fullmatch(short):
            found[short] = tensor
    return found


def _is_transposed(tensors: Mapping[str, Tensor]) -> bool:
    """Return whether matrices are those of torch.nn.Linear."""
    width = _matrix(tensors, _TOKENS)[1]
    shape = _matrix(tensors, _FIRST)
    if shape not in ((width, 3 * width), (3 * width, width)):
        allowed = f"allowed: [{width}, {3 * width}] or its transpose, as GPT-2 has"
        raise UserError(FIELD, f"{_FIRST} has the shape {list(shape)}; {allowed}")
    return shape[0] > shape[1]


def _read_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the fields of config.json that shapes show."""
    vocabulary, width = _matrix(tensors, _TOKENS)
    blocks = (int(found[1]) for name in tensors if (found := _BLOCK.fullmatch(name)))
    return {
        "vocab_size": vocabulary,
        "n_positions": _matrix(tensors, _POSITIONS)[0],
        "n_embd": width,
        "n_layer": 1 + max(blocks),
        "n_inner": _matrix(tensors, "h.0.mlp.c_fc.weight")[1],
    }


def _wanted_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """Return the name and the shape of every tensor but the head."""
    width, inner = sizes["n_embd"], sizes["n_inner"]
    matrices = ((width, 3 * width), (width, width), (width, inner), (inner, width))
    shapes: dict[str, tuple[int, ...]] = {
        _TOKENS: (sizes["vocab_size"], width),
        _POSITIONS: (sizes["n_positions"], width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    for block in range(sizes["n_layer"]):
        for name in _NORMS:
            shapes |= {f"h.{block}.{name}.{part}": (width,) for part in ("weight", "bias")}
        for name, shape in zip(_MATRICES, matrices, strict=True):
            shapes[f"h.{block}.{name}.weight"] = shape
            shapes[f"h.{block}.{name}.bias"] = (shape[1],)
    return shapes


def _check_shapes(tensors: Mapping[str, Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
    for name in tensors:
        if name not in wanted:
            raise UserError(FIELD, f"the tensor {name} is not one of GPT-2; allowed: a GPT-2 shape")
    for name, shape in wanted.items():
        if name not in tensors:
            raise UserError(FIELD, f"has no tensor {name}; allowed: a GPT-2 shape")
        if tuple(tensors[name].shape) != shape:
            detail = f"{list(tensors[name].shape)}; allowed: {list(shape)}"
            raise UserError(FIELD, f"{name} has the shape {detail}")


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of all tensors."""
    dtypes = {each.dtype for each in tensors.values()}
    if len(dtypes) != 1 or not dtypes <= set(_DTYPES):
        found = ", ".join(sorted(map(str, dtypes)))
        allowed = ", ".join(_DTYPES.values())
        raise UserError(FIELD, f"its weights are {found}; allowed: all {allowed}")
    if any(each.is_meta or each.layout != torch.strided for each in tensors.values()):
        raise UserError(FIELD, "has tensors that are sparse or without values; allowed: dense ones")
    return dtypes.pop()


def _check_plain(settings: Mapping[str, Any]) -> None:
    """Refuse settings that transformers' GPT2Config would not take."""
    for name, value in settings.items():
        kind = {"activation_function": str, "layer_norm_epsilon": float}.get(name, bool)
        is_plain = type(value) is kind or (value is None and kind is str)
        if not is_plain or (kind is float and not math.isfinite(value)):
            raise UserError(FIELD, f"its {name} is {value!r}; allowed: a {kind.__name__}")


def _heads(settings: Mapping[str, Any], given: int | None, width: int) -> int:
    known = next((settings[name] for name in _HEADS if name in settings), None)
    if known is None and given is None:
        raise UserError("--heads", "the file does not say how many heads a block has; give it")
    if known is not None and type(known) is not int:
        raise UserError(FIELD, f"its number of heads is {known!r}; allowed: an integer")
    if None not in (known, given) and known != given:
        raise UserError("--heads", f"{given}, and the file says {known}; leave it out")
    count = given if known is None else known
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or width % count:
        raise UserError("--heads", f"{count!r}; allowed: a divisor of the width, {width}")
    return count


def _activation(settings: Mapping[str, Any], given: str | None, *, is_transposed: bool) -> str:
    known = settings.get("activation_function")
    if None not in (known, given) and known != given:
        raise UserError("--activation", f"{given}, and the file says {known}; leave it out")
    chosen = given if known is None else known
    if chosen is None and is_transposed:
        detail = "give it: gelu of nanoGPT, gelu_new of minGPT"
        raise UserError(
            "--activation", f"the file does not say the function of the blocks; {detail}"
        )
    chosen = "gelu_new" if chosen is None else chosen  # of GPT-2 itself
    if chosen not in ACTIVATIONS:
        raise UserError("--activation", f"{chosen!r}; allowed: {', '.join(ACTIVATIONS)}")
    return str(chosen)
