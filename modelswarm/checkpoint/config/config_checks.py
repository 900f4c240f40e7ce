"""Checks config.json: every value that would end in a traceback, or in wrong text without an error, is refused.

One function for all: `facts.read_config` calls it, and with it `modelswarm plan`, `up`, the operator's inspection and
each server at its start. Every sentence names the file, the field, its value and what is allowed. Reads no tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from modelswarm.checkpoint.config.fields import POSITIVE, Fields, is_count, is_positive, refuse
from modelswarm.checkpoint.config.rope_checks import check_rope, is_number
from modelswarm.checkpoint.families.family import BlockPath, Family
from modelswarm.checkpoint.families.table import ACTIVATIONS, FAMILIES, LAYER_TYPES

UNQUANTISED = (
    "quantised checkpoints are not served, allowed are weights in float32, bfloat16 or float16"
)
MAX_EXPERTS = 4096
"""Most experts of a block: each has a name in the plan of the tensors. The largest models have a few hundred."""
ADDING = "docs/reference/adding-a-model-family.md says how to add one"
_QUANTISATION_FIELDS = ("quantization_config", "compression_config", "quantization")
_PORTED_CLASSES = ("Config", "Model", "ForCausalLM")
_REMOTE_CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")


def check_config(config: Mapping[str, Any], path: Path) -> Fields:
    """Return the fields that describe the text model; refuse what cannot be served."""
    family = _family_of(config, path)
    nested = config.get("text_config") if family.nested else None
    text = nested if isinstance(nested, dict) else config
    fields = Fields(path, family, text)
    for each in (config, text):
        _check_quantisation(each, family, path)
    _check_remote_code(config, family, path)
    _check_architectures(config, family, path)
    _check_values(fields)
    _check_window(fields)
    _check_activation(text, family, path)
    _check_heads(fields)
    _check_experts(fields)
    _check_groups(fields)
    _check_layer_types(fields)
    is_partial_served = family.path is BlockPath.GENERIC
    check_rope(text, lambda field, value, rule: refuse(path, field, value, rule), is_partial_served)
    if text.get("per_layer_config"):
        rule = "allowed is none, as all blocks have the fields of the model"
        refuse(path, "per_layer_config", text["per_layer_config"], rule)
    if text.get("use_bidirectional_attention"):
        value = text["use_bidirectional_attention"]
        refuse(path, "use_bidirectional_attention", value, "allowed is false")
    if not text.get("is_causal", True):  # transformers asks it for the masks of all families
        refuse(path, "is_causal", text["is_causal"], "allowed is true")
    return fields


def _check_values(fields: Fields) -> None:
    """Refuse single fields with a value that no family has, or that this one is not served with."""
    text, path, family = fields.values, fields.path, fields.family
    for name, (is_allowed, allowed) in _FIELDS.items():
        if text.get(name) is not None and not is_allowed(text[name]):
            refuse(path, name, text[name], f"allowed is {allowed}")
    for name, values in family.limits.items():
        if text.get(name) is not None and text[name] not in values:
            refuse(path, name, text[name], f"allowed is {' or '.join(map(_json_word, values))}")
    for name, other in family.equal.items():
        if fields.integer(name) != fields.integer(other):
            rule = f"allowed is {fields.own_name(other)}, {fields.integer(other)}"
            fields.refuse(name, fields.integer(name), rule)
    for name in family.absent:
        if name in text:
            rule = "allowed is none, as transformers runs such a model as one of another family"
            refuse(path, name, text[name], rule)


def _check_heads(fields: Fields) -> None:
    """Refuse heads, key/value heads and a head size that do not fit together."""
    family = fields.family
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if (fields.get("head_dim") is None or family.heads_divide_hidden) and hidden % heads:
        rule = f"allowed are divisors of {fields.own_name('hidden_size')}, {hidden}"
        fields.refuse("num_attention_heads", heads, rule)
    kv_heads = fields.integer("num_key_value_heads")
    if heads % kv_heads:
        rule = f"allowed are divisors of {fields.own_name('num_attention_heads')}, {heads}"
        fields.refuse("num_key_value_heads", kv_heads, rule)
    size = fields.head_size()
    if family.is_rotary and size % 2:
        rule = "allowed are even numbers, as rotary positions need pairs"
        fields.refuse("head_dim", size, rule)


def _check_experts(fields: Fields) -> None:
    """Refuse too many experts, and a router that picks more than there are."""
    if not fields.family.experts:
        return
    count, picked = (
        fields.integer(fields.family.expert_count),
        fields.integer("num_experts_per_tok"),
    )
    if count > MAX_EXPERTS:
        fields.refuse(fields.family.expert_count, count, f"allowed are at most {MAX_EXPERTS}")
    if picked > count:
        rule = f"allowed are at most {fields.own_name(fields.family.expert_count)}, {count}"
        fields.refuse("num_experts_per_tok", picked, rule)


def _check_groups(fields: Fields) -> None:
    """Refuse groups of experts that the router cannot form, or cannot rank by their best experts."""
    family = fields.family
    if not family.ranked_experts:
        return
    count, groups, picked = map(fields.integer, (family.expert_count, "n_group", "topk_group"))
    if count % groups or count // groups < family.ranked_experts:
        rule = f"allowed are divisors of {family.expert_count}, {count}"
        fields.refuse(
            "n_group", groups, f"{rule}, with at least {family.ranked_experts} in a group"
        )
    if picked > groups:
        fields.refuse("topk_group", picked, f"allowed are at most n_group, {groups}")


def _check_window(fields: Fields) -> None:
    """Refuse a sliding window that is no length, or that has no effect, unless the model says that it uses none."""
    window = fields.get("sliding_window")
    if window is None or fields.get("use_sliding_window") is False:
        return
    if not fields.family.has_window:
        rule = "allowed is null, as no block of this family has a window"
        fields.refuse("sliding_window", window, rule)
    if not is_positive(window):
        fields.refuse("sliding_window", window, POSITIVE)


def _family_of(config: Mapping[str, Any], path: Path) -> Family:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        rule = f"allowed are {', '.join(sorted(FAMILIES))}; {ADDING}"
        refuse(path, "model_type", model_type, rule)
    return FAMILIES[model_type]


def _json_word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _check_quantisation(config: Mapping[str, Any], family: Family, path: Path) -> None:
    for name in _QUANTISATION_FIELDS:
        value = config.get(name)
        method = value.get("quant_method") if isinstance(value, dict) else None
        if method is not None and method == family.quantisation:
            continue
        if isinstance(value, dict) and "quant_method" in value:
            refuse(path, f"{name}.quant_method", value["quant_method"], UNQUANTISED)
        if value is not None:
            refuse(path, name, value, UNQUANTISED)


def _check_remote_code(config: Mapping[str, Any], family: Family, path: Path) -> None:
    names = config.get("auto_map", {})
    if not isinstance(names, dict):
        refuse(path, "auto_map", names, "allowed is an object")
    start = family.architecture.removesuffix("ForCausalLM")
    for name in _REMOTE_CLASSES:
        if name in names:
            found = str(names[name]).rpartition(".")[2]
            if family.is_ported and found in (f"{start}{end}" for end in _PORTED_CLASSES):
                continue
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


def _check_layer_types(fields: Fields) -> None:
    kinds = fields.get("layer_types")
    if kinds is None:
        return
    served = LAYER_TYPES if fields.family.has_window else {"full_attention"}
    allowed = ", ".join(sorted(served))
    if not isinstance(kinds, list):
        fields.refuse("layer_types", kinds, f"allowed is a list of {allowed}")
    for kind in kinds:
        if not isinstance(kind, str) or kind not in served:
            fields.refuse("layer_types", kind, f"allowed are {allowed}")
    layers = fields.integer("num_hidden_layers")
    if len(kinds) != layers:
        rule = f"allowed is the number of layer_types, {len(kinds)}"
        fields.refuse("num_hidden_layers", layers, rule)


def _is_token(value: object) -> bool:
    ids = value if isinstance(value, list) else [value]
    return all(isinstance(each, int) and not isinstance(each, bool) for each in ids)


def _are_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_positive_number(value: object) -> bool:
    return is_number(value) and value > 0  # type: ignore[operator]  # is_number says so


def _is_share(value: object) -> bool:
    return is_number(value) and 0 <= value <= 1  # type: ignore[operator]


_Rule = tuple[Callable[[object], bool], str]
_INTEGER: _Rule = (is_positive, POSITIVE.removeprefix("allowed is "))
_COUNT: _Rule = (is_count, "an integer from 0 on")
_NUMBER: _Rule = (_is_positive_number, "a number above 0")
_FLAG: _Rule = (lambda value: isinstance(value, bool), "true or false")
_TOKEN: _Rule = (_is_token, "a token id or a list of them")
_FIELDS: dict[str, _Rule] = {
    **dict.fromkeys(("head_dim", "intermediate_size", "decoder_sparse_step"), _INTEGER),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), _COUNT),
    "mlp_only_layers": (_are_counts, "a list of numbers of blocks"),
    **dict.fromkeys(
        (
            *("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar"),
            *("attn_logit_softcapping", "final_logit_softcapping", "logits_scaling"),
            "rotary_emb_base",
        ),
        _NUMBER,
    ),
    **dict.fromkeys(
        ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window"), _FLAG
    ),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (_is_share, "a number from 0 to 1")),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _TOKEN),
}
"""Field -> its rule. A field that is missing or null has the family's default."""
