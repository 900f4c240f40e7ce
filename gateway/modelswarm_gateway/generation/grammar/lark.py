"""Writes llguidance's Lark: texts with special tokens among them, JSON by a schema, and texts up to a marker.

Used by the grammars of tool calls. A marker that is one token of the model is written as a placeholder. The grammar's
check knows no ids: `check_process.py` puts them in afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from modelswarm.protocol.sampling import MAX_GRAMMAR_BYTES

_PLACEHOLDER = "<|marker_{}|>"
ANY_TEXT = r"/(.|\n)*/"


class GrammarTooLarge(ValueError):
    """No link carries the grammar; the text says why."""

    def __init__(self) -> None:
        detail = "shorten the schemas; calls that are not JSON repeat all $defs for each property"
        super().__init__(f"the grammar has more than {MAX_GRAMMAR_BYTES} bytes; {detail}")


class LarkRules:
    """The rules of one grammar; expressions are strings."""

    def __init__(self, special: Collection[str]) -> None:
        """`special`: markers that are one token of the model; text never matches them."""
        self._lines, self._json_characters = ["%llguidance {}"], 0
        self._placeholders = dict(zip(sorted(special), placeholders(len(special)), strict=True))
        longest_first = sorted(special, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def text(self) -> str:
        return "\n".join(self._lines)

    def add_rule(self, name: str, expression: str) -> str:
        """Add a rule, or a terminal if the name is in capitals. Return its name, without options."""
        self._lines.append(f"{name}: {expression}")
        return name.split("[")[0]

    def is_token(self, marker: str) -> bool:
        return marker in self._placeholders

    def words(self, text: str) -> str:
        """Return the expression of a text, in which markers may stand."""
        parts: list[str] = []
        start = 0
        for found in self._markers.finditer(text):
            parts.append(quote(text[start : found.start()]))
            parts.append(self._placeholders[found.group()])
            start = found.end()
        parts.append(quote(text[start:]))
        return " ".join(part for part in parts if part)

    def token_at_start(self, text: str) -> str:
        """Return the marker that is a token and begins the text; "" if none does."""
        found = self._markers.match(text)
        return "" if found is None else found.group()

    def json(self, schema: Mapping[str, Any], whitespace: str | None = "") -> str:
        """Return the expression of JSON that follows the schema. `whitespace`: as that of a GrammarSource.

        Raise GrammarTooLarge once all schemas are too large together, before they fill the memory.
        """
        text = _dump({**schema, "x-guidance": json_options(whitespace)})
        self._json_characters += len(text)
        if self._json_characters > MAX_GRAMMAR_BYTES:
            raise GrammarTooLarge
        return f"%json {text}"

    def up_to(self, marker: str, name: str, *, starts: str = "") -> str:
        """Return the expression of any text through the first `marker`.

        `name`: of a rule, unused so far. `starts`: name of a terminal that the text must match; default: any text.
        """
        if marker in self._placeholders:
            other = f"{starts or ANY_TEXT} & ~{holding(marker)}"
            terminal = self.add_rule(name.upper(), other)
            return f"{terminal} {self.words(marker)}"
        return self.add_rule(f"{name}[lazy]", f"{starts or ANY_TEXT} {quote(marker)}")


def placeholders(count: int) -> list[str]:
    """Return the names of markers that are tokens, in the order of the sorted markers."""
    return [_PLACEHOLDER.format(place) for place in range(count)]


def json_options(whitespace: str | None) -> dict[str, Any]:
    """Return llguidance's options for the whitespace between the parts of JSON."""
    if whitespace is None:
        return {"whitespace_flexible": True}
    if not whitespace:
        return {"whitespace_flexible": False}
    return {"whitespace_flexible": True, "whitespace_pattern": whitespace}


def regex_of(text: str) -> str:
    """Return the regex of a text, as it stands within slashes."""
    return re.escape(text).replace("/", r"\/")


def holding(text: str) -> str:
    """Return the terminal of all texts that hold this one."""
    return rf"/(.|\n)*{regex_of(text)}(.|\n)*/"


def _dump(value: object) -> str:
    """Return JSON in which no placeholder can stand, and no character that Lark refuses in a string."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace("\x7f", "\\u007f")


def quote(words: str) -> str:
    """Return a Lark string; nothing for no words."""
    return _dump(words) if words else ""
