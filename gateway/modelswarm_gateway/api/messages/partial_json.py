"""Reads the JSON of a call's arguments that an answer did not end, because it reached its limit.

Used for whole responses, whose tool_use blocks have an object. Streams send the text as it is.
"""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64  # of brackets that are closed
_CLOSING = {"{": "}", "[": "]"}


def read_arguments(text: str) -> dict[str, Any]:
    """Return the object that the text has, or as much of it as is complete."""
    for candidate in (text or "{}", _closed_beginning(text)):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


def _closed_beginning(text: str) -> str:
    """Return the text up to the last place where a value may have ended, with its brackets closed."""
    end, ends = 0, ""
    closing: list[str] = []
    in_string = is_escaped = False
    for place, character in enumerate(text):
        if len(closing) > MAX_DEPTH:
            break
        if in_string:
            in_string = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            in_string = True
        elif character in _CLOSING:
            closing.append(_CLOSING[character])
            end, ends = place + 1, "".join(reversed(closing))
        elif character in "]}" and closing:
            closing.pop()
            end, ends = place + 1, "".join(reversed(closing))
        elif character == ",":
            end, ends = place, "".join(reversed(closing))
    return text[:end] + ends
