"""The check of integers that callers give: those of numpy are some, truth values are none."""

from __future__ import annotations

import numbers
from typing import TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
