"""The format of a chat's content as Lark: JSON by a schema, a regex or a choice, as a part of the answer's grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from modelswarm_gateway.generation.grammar.lark import LarkRules, quote
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource

# An escaped character, or one that Lark's slashes do not hold, or the begin of a placeholder.
_ESCAPED = re.compile(r"\\.|/|\n|<(?=\|marker_)", re.DOTALL)
_IN_SLASHES = {"/": r"\/", "\n": r"\n", "\\\n": r"\n", "<": r"\x3c"}
_MORE_PROPERTIES = {"$ref", "anyOf", "oneOf", "allOf", "patternProperties"}


def write_content(rules: LarkRules, content: GrammarSource, not_first: Sequence[str]) -> str:
    """Return the expression of the content. `not_first`: regexes that it does not begin with, behind white space.

    JSON begins with none of them.
    """
    match content.kind:
        case GrammarKind.JSON_SCHEMA:
            return rules.json(json.loads(content.text), content.whitespace)
        case GrammarKind.REGEX:
            pattern = _ESCAPED.sub(lambda m: _IN_SLASHES.get(m[0], m[0]), content.text)
            fitting = f"/{pattern}/"
        case GrammarKind.CHOICE:
            fitting = f"({' | '.join(quote(each) for each in json.loads(content.text))})"
        case _:
            raise ValueError(f"{content.kind} is the grammar of a whole answer")
    if not_first:
        fitting = rf"{fitting} & ~/\s*({'|'.join(not_first)})(.|\n)*/"
    return rules.add_rule("CONTENT", fitting)


def may_be_call(content: GrammarSource) -> bool:
    """Return whether the content may be a JSON object with `name` and `parameters`, as far as its schema tells."""
    if content.kind is not GrammarKind.JSON_SCHEMA:
        return False
    if (
        content.whitespace != ""
    ):  # lexemes of two grammars with different whitespace get in each other's way
        return True
    schema = json.loads(content.text)
    if schema.get("type") in ("array", "string", "number", "integer", "boolean", "null"):
        return False
    is_closed = schema.get("type") == "object" and schema.get("additionalProperties") is False
    if not is_closed or _MORE_PROPERTIES & schema.keys():
        return True
    properties: dict[str, Any] = schema.get("properties", {})
    return {"name", "parameters"} <= properties.keys()
