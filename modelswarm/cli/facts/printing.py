"""Prints one object as one line of JSON. Used by every command with `--json`."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from typing import Any


def print_json(facts: Mapping[str, Any]) -> None:
    """Print an object as one line at once."""
    sys.stdout.write(f"{to_json(facts)}\n")
    sys.stdout.flush()


def to_json(facts: Mapping[str, Any]) -> str:
    """Return an object as one line. Numbers that JSON does not know (nan, inf) become null."""
    return json.dumps(_without_non_finite(facts), allow_nan=False)


def _without_non_finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_non_finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_non_finite(part) for part in value]
    return value
