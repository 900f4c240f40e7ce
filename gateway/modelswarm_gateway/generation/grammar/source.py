"""The grammar that a request asks for, before it is translated and checked.

Made by `request_fields.py` and `answer_grammar.py`, translated by `translation.py` in the grammar process.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

MAX_SOURCE_BYTES = 256 << 10
"""Bytes of a schema, a regex or a grammar; the largest schemas of the public corpora have about 200 KB."""


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"  # text: a JSON object
    REGEX = "regex"
    CHOICE = "choice"  # text: a JSON list of strings
    GRAMMAR = "grammar"  # text: Lark, or llama.cpp's GBNF
    ANSWER = "answer"  # text: Lark with placeholders of markers, as `lark.py` writes it
    STRUCTURAL_TAG = "structural_tag"  # text: a JSON list of [trigger, begin, schema, end]


CONTENT_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.CHOICE)
"""Formats of a chat's content, beside its reasoning and calls. The other kinds describe the whole answer."""


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """A source that a grammar is made of, to say which one cannot be used."""

    param: str  # field of the request
    text: str
    kind: GrammarKind = GrammarKind.JSON_SCHEMA


@dataclass(frozen=True, slots=True)
class GrammarSource:
    kind: GrammarKind
    text: str
    param: str  # field of the request, for errors
    whitespace: str | None = ""
    """Regex of the whitespace between the parts of JSON; empty: none, None: any."""
    parts: tuple[GrammarPart, ...] = ()  # checked one by one before the whole
    tokens: tuple[tuple[str, int], ...] = ()
    """Markers in the text that are one token of the model, sorted, with its id. Clients' grammars name them."""
