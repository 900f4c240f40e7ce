"""The grammar of tool calls: names of the tools, arguments by their schemas, in the form of a model family.

Used by `tool_calls/`, which knows the families' texts. Knows no requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from modelswarm_gateway.generation.grammar.schema_checks import SchemaError, dump_schema
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarSource

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def tool_call_grammar(
    tools: Sequence[tuple[str, Mapping[str, Any] | None]],
    *,
    begin: str = "",
    end: str = "",
    separator: str = "",
    arguments_key: str = "arguments",
    parallel: bool = True,
    param: str = "tools",
) -> GrammarSource:
    """Return the grammar of one call or more: `begin`, {"name": NAME, `arguments_key`: ARGUMENTS}, `end`.

    `tools`: name and JSON schema of the arguments, those that the model may call. `separator` stands between two calls.
    `begin` and `end` may name special tokens: they are given as text, and the whole must be what the model reads.
    Raise SchemaError for a schema that cannot be used.
    """
    lines = ["%llguidance {}", "start: call" + (f" ({_text(separator)} call)*" if parallel else "")]
    names = [f"call_{place}" for place in range(len(tools))]
    lines.append(f"call: {_text(begin)} ({' | '.join(names)}) {_text(end)}")
    for rule, (name, parameters) in zip(names, tools, strict=True):
        try:
            schema = dump_schema(dict(parameters or NO_PARAMETERS), strict=False)
        except SchemaError as error:
            raise SchemaError(f"the tool {name}: {error}") from error
        inner = json.loads(schema)
        inner.setdefault("type", "object")
        inner["x-guidance"] = {"whitespace_flexible": False}
        head = json.dumps({"name": name}, ensure_ascii=False)[:-1] + f', "{arguments_key}": '
        lines.append(
            f"{rule}: {_text(head)} %json {json.dumps(inner, ensure_ascii=False)} {_text('}')}"
        )
    return GrammarSource(GrammarKind.GRAMMAR, "\n".join(lines), param)


def _text(words: str) -> str:
    """Return a Lark string; nothing for no words."""
    return json.dumps(words, ensure_ascii=False) if words else ""
