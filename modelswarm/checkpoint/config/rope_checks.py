"""Checks the rotary positions of config.json: `rope_parameters`, and `rope_scaling` of older checkpoints.

Called by `config_checks.py`. A key that transformers would ignore is refused, since it may have been meant to change
the text. Knows no files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from modelswarm.checkpoint.families.table import LAYER_TYPES, ROPE_TYPES

Refuse = Callable[[str, object, str], NoReturn]
"""Raises the sentence for (field, value, rule)."""

_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
_OPTIONAL = {
    "default": (),
    "linear": (),
    "llama3": (),
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_ALWAYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_WITHOUT_EFFECT = ("rope_type", "type", "finetuned")  # of the computation of any type


def check_rope(text: Mapping[str, Any], refuse: Refuse, is_partial_served: bool) -> None:
    """Refuse types and values of rotary positions that are not served.

    `is_partial_served`: a part of each head may be rotated.
    """
    if not is_partial_served:
        _check_partial(text, "partial_rotary_factor", refuse)
    for name in ("rope_parameters", "rope_scaling"):
        rope = text.get(name)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            refuse(name, rope, "allowed is an object")
        if rope.keys() & LAYER_TYPES:  # Gemma 3 has one per type of layer
            for kind, each in rope.items():
                _check_one(each, f"{name}.{kind}", refuse, is_partial_served)
        else:
            _check_one(rope, name, refuse, is_partial_served)


def is_number(value: object) -> bool:
    """True for a finite number; Python's JSON also has NaN and Infinity."""
    is_numeric = isinstance(value, int | float) and not isinstance(value, bool)
    # An integer may be larger than any float.
    return is_numeric and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def _check_one(rope: object, field: str, refuse: Refuse, is_partial_served: bool) -> None:
    if rope is None:
        return
    if not isinstance(rope, dict):
        refuse(field, rope, "allowed is an object")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_TYPES:
        refuse(f"{field}.rope_type", kind, f"allowed are {', '.join(sorted(ROPE_TYPES))}")
    allowed = (*_NEEDED[kind], *_OPTIONAL[kind], *_ALWAYS)
    for name in _NEEDED[kind]:
        if name not in rope:
            refuse(f"{field}.{name}", None, f"rope_type {kind!r} needs a number")
    for name, value in rope.items():
        if name in _WITHOUT_EFFECT:
            continue
        if name not in allowed:
            rule = f"allowed for rope_type {kind!r} are {', '.join(sorted(allowed))}"
            refuse(f"{field}.{name}", value, rule)
        _check_value(name, value, field, refuse)
    if not is_partial_served:
        _check_partial(rope, f"{field}.partial_rotary_factor", refuse)
    if kind == "llama3" and not rope["low_freq_factor"] < rope["high_freq_factor"]:
        rule = f"allowed is more than low_freq_factor, {rope['low_freq_factor']}"
        refuse(f"{field}.high_freq_factor", rope["high_freq_factor"], rule)


def _check_value(name: str, value: Any, field: str, refuse: Refuse) -> None:
    if name == "truncate":
        if not isinstance(value, bool):
            refuse(f"{field}.{name}", value, "allowed is true or false")
        return
    least = 1 if name == "factor" else 0
    is_given = value is not None or name in ("factor", "low_freq_factor", "high_freq_factor")
    if is_given and not (is_number(value) and value >= least):
        refuse(f"{field}.{name}", value, f"allowed is a number of at least {least}")
    if name == "partial_rotary_factor" and value is not None and value > 1:
        refuse(f"{field}.{name}", value, "allowed is a number from 0 to 1")


def _check_partial(values: Mapping[str, Any], field: str, refuse: Refuse) -> None:
    value = values.get("partial_rotary_factor")
    if value is not None and value != 1:
        refuse(field, value, "allowed is 1, as whole heads are rotated")
