"""The fields of one config.json, by the names that transformers has in common for all families.

`config_checks.py` makes it, and hands it to all that read the configuration. Every refusal names the file and the field
as the file has it. Knows no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from modelswarm.checkpoint.families.family import Family
from modelswarm.errors import ModelSourceError

MAX_VALUE_CHARACTERS = 80  # of a value that is shown in a sentence
MAX_INTEGER = 2**53
"""Largest integer that every JSON reader represents exactly; the operator's facts hold no larger one."""
POSITIVE = "allowed is a positive integer up to 2^53"

Dimension: TypeAlias = tuple[str, int]
"""The fields of config.json that give one dimension, and the number that they give."""


def refuse(path: Path, field: str, value: object, rule: str) -> NoReturn:
    """Raise the sentence about one field of config.json."""
    shown = repr(value)
    if len(shown) > MAX_VALUE_CHARACTERS:
        shown = f"{shown[:MAX_VALUE_CHARACTERS]}..."
    raise ModelSourceError("model", f"{path}: {field} is {shown}; {rule}")


@dataclass(frozen=True, slots=True)
class Fields:
    """The part of a config.json that describes the text model."""

    path: Path
    family: Family
    values: Mapping[str, Any]

    def own_name(self, name: str) -> str:
        """Return the name that the file has for a field."""
        names = (name, *self.family.aliases.get(name, ()))
        return next((each for each in names if self.values.get(each) is not None), name)

    def get(self, name: str) -> Any:
        """Return a field, or its default; None if it has neither."""
        value = self.family.derive(self.values).get(name)
        if value is None:
            value = self.values.get(self.own_name(name))
        return self.family.defaults.get(name) if value is None else value

    def refuse(self, name: str, value: object, rule: str) -> NoReturn:
        refuse(self.path, self.own_name(name), value, rule)

    def integer(self, name: str) -> int:
        """Return a positive integer, given or by default."""
        value = self.get(name)
        if isinstance(value, str) and self.values.get(self.own_name(name)) is None:
            return self.dimension(value)[1]
        if not is_positive(value):
            self.refuse(name, value, POSITIVE)
        assert isinstance(value, int)
        return value

    def dimension(self, expression: str) -> Dimension:
        """Return a sum of products of fields: its words and its value."""
        value = 0
        for product in expression.split("+"):
            factors = product.split("*")
            value += math.prod(
                int(each) if each.isdigit() else self._factor(each) for each in factors
            )
        words = expression.replace("*", " x ").replace("+", " + ")
        names = [self.own_name(word) for word in words.split()]
        return " ".join(names), value

    def _factor(self, name: str) -> int:
        return self.head_size() if name == "head_dim" else self.integer(name)

    def head_size(self) -> int:
        given = self.get("head_dim")
        if given is None:
            return self.integer("hidden_size") // self.integer("num_attention_heads")
        return self.integer("head_dim")


def is_count(value: object) -> bool:
    """True for an integer from 0 to MAX_INTEGER; JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER


def is_positive(value: object) -> bool:
    """True for an integer from 1 to MAX_INTEGER."""
    return is_count(value) and value != 0
