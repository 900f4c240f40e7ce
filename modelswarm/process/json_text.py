"""JSON of plain objects whose numbers may be infinite. Used for lines of `--json`, and by the page for a browser."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


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
