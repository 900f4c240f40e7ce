"""Checks config.json: every value that would end in a traceback, or in wrong text without an error, is refused.

One function for all: `facts.read_config` calls it, and with it `modelswarm plan`, `up`, the operator's inspection and
each server at its start. Every sentence names the file, the field, its value and what is allowed. Reads no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from modelswarm.checkpoint.families import ACTIVATIONS, FAMILIES, LAYER_TYPES, Family
from modelswarm.checkpoint.rope_checks import check_rope, is_number
from modelswarm.errors import ModelSourceError

MAX_VALUE_CHARACTERS = 80  # of a value that is shown in a sentence
UNQUANTISED = (
    "quantised checkpoints are not served, allowed are weights in float32, bfloat16 or float16"
)
_QUANTISATION_FIELDS = ("quantization_config", "compression_config", "quantization")
_REMOTE_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def check_config(config: Mapping[str, Any], path: Path) -> tuple[Family, Mapping[str, Any]]:
    """Return the family and the part of config.json that describes the text model; refuse what cannot be served."""
    family = _family_of(config, path)
    nested = config.get("text_config") if family.nested else None
    text = nested if isinstance(nested, dict) else config
    for each in (config, text):
        _check_quantisation(each, path)
    _check_remote_code(config, path)
    _check_architectures(config, family, path)
    for name, (is_allowed, allowed) in _FIELDS.items():
        if text.get(name) is not None and not is_allowed(text[name]):
            refuse(path, name, text[name], f"allowed is {allowed}")
    _check_activation(text, family, path)
    check_heads(text, family, path)
    _check_layer_types(text, path)
    check_rope(text, lambda field, value, rule: refuse(path, field, value, rule))
    if text.get("use_bidirectional_attention"):
        value = text["use_bidirectional_attention"]
        refuse(path, "use_bidirectional_attention", value, "allowed is false")
    return family, text


def refuse(path: Path, field: str, value: object, rule: str) -> NoReturn:
    """Raise the sentence about one field of config.json."""
    shown = repr(value)
    if len(shown) > MAX_VALUE_CHARACTERS:
        shown = f"{shown[:MAX_VALUE_CHARACTERS]}..."
    raise ModelSourceError("model", f"{path}: {field} is {shown}; {rule}")


def positive_integer(
    text: Mapping[str, Any], name: str, path: Path, default: int | None = None
) -> int:
    """Return a field, or its default if config.json leaves it out."""
    value = text.get(name)
    value = default if value is None else value
    if not _is_positive(value):
        refuse(path, name, value, "allowed is a positive integer")
    assert isinstance(value, int)
    return value


def check_heads(text: Mapping[str, Any], family: Family, path: Path) -> tuple[int, int, int]:
    """Return heads, key/value heads and head size; refuse those that do not fit together."""
    hidden = positive_integer(text, "hidden_size", path)
    heads = positive_integer(text, "num_attention_heads", path, family.heads)
    kv_heads = positive_integer(text, "num_key_value_heads", path, family.kv_heads or heads)
    given = text.get("head_dim")
    given = family.head_dim if given is None else given
    if (given is None or family.heads_divide_hidden) and hidden % heads:
        rule = f"allowed are divisors of hidden_size, {hidden}"
        refuse(path, "num_attention_heads", heads, rule)
    if heads % kv_heads:
        rule = f"allowed are divisors of num_attention_heads, {heads}"
        refuse(path, "num_key_value_heads", kv_heads, rule)
    size = hidden // heads if given is None else given
    if size % 2:
        refuse(path, "head_dim", size, "allowed are even numbers, as rotary positions need pairs")
    return heads, kv_heads, size


def _family_of(config: Mapping[str, Any], path: Path) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        refuse(path, "model_type", model_type, f"allowed are {', '.join(sorted(FAMILIES))}")
    return FAMILIES[model_type]


def _check_quantisation(config: Mapping[str, Any], path: Path) -> None:
    for name in _QUANTISATION_FIELDS:
        value = config.get(name)
        if isinstance(value, dict) and "quant_method" in value:
            refuse(path, f"{name}.quant_method", value["quant_method"], UNQUANTISED)
        if value is not None:
            refuse(path, name, value, UNQUANTISED)


def _check_remote_code(config: Mapping[str, Any], path: Path) -> None:
    names = config.get("auto_map")
    for name in _REMOTE_CLASSES:
        if isinstance(names, dict) and name in names:
            rule = "code of a checkpoint is not run, allowed are the classes of transformers"
            refuse(path, f"auto_map.{name}", names[name], rule)


def _check_architectures(config: Mapping[str, Any], family: Family, path: Path) -> None:
    found = config.get("architectures")
    if found is None:
        return
    if not isinstance(found, list) or family.architecture not in found:
        rule = f"allowed for {config['model_type']} is {[family.architecture]!r}"
        refuse(path, "architectures", found, rule)


def _check_activation(text: Mapping[str, Any], family: Family, path: Path) -> None:
    name = family.activation
    value = text.get(name)
    if value is not None and (not isinstance(value, str) or value not in ACTIVATIONS):
        refuse(path, name, value, f"allowed are {', '.join(sorted(ACTIVATIONS))}")


def _check_layer_types(text: Mapping[str, Any], path: Path) -> None:
    kinds = text.get("layer_types")
    if kinds is None:
        return
    allowed = ", ".join(sorted(LAYER_TYPES))
    if not isinstance(kinds, list):
        refuse(path, "layer_types", kinds, f"allowed is a list of {allowed}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in LAYER_TYPES:
            refuse(path, "layer_types", kind, f"allowed are {allowed}")
    layers = positive_integer(text, "num_hidden_layers", path)
    if len(kinds) != layers:
        rule = f"allowed is the number of layer_types, {len(kinds)}"
        refuse(path, "num_hidden_layers", layers, rule)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_token(value: object) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(isinstance(each, int) and not isinstance(each, bool) for each in ids)


def _is_positive_number(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]  # is_number says so


_Rule = tuple[Callable[[object], bool], str]
_INTEGER: _Rule = (_is_positive, "a positive integer")
_NUMBER: _Rule = (_is_positive_number, "a number above 0")
_FLAG: _Rule = (lambda value: isinstance(value, bool), "true or false")
_TOKEN: _Rule = (_is_token, "a token id or a list of them")
_FIELDS: dict[str, _Rule] = {
    **dict.fromkeys(("head_dim", "intermediate_size", "sliding_window"), _INTEGER),
    **dict.fromkeys(
        (
            *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
            *("attn_logit_softcapping", "final_logit_softcapping"),
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), _FLAG
    ),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKEN),
}
"""Field -> its rule. A field that is missing or null has the family's default."""
