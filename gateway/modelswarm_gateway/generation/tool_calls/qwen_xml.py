"""Calls of Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.

The arguments become JSON. A value that the tool's schema calls a string is passed on as it arrives. Any other value is
what it reads as in JSON or Python, if the schema allows that type. Else it is a string.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from types import NoneType

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.reader import OutputReader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
_TYPES: Mapping[str, tuple[type, ...]] = {
    **{"string": (str,), "boolean": (bool,), "array": (list,), "object": (dict,)},
    **{"integer": (int, float), "number": (int, float), "null": (NoneType,)},
}


class QwenXmlReader(OutputReader):
    @override
    def _parse(self) -> Steps[None]:
        while not self.has_ended and (yield from self._text_before_call(BEGIN, FUNCTION)):
            self._mark()
            if (yield from self._accept(BEGIN)):
                yield from self._skip_space()
            if not (yield from self._call()):
                self._show_marked()
                continue
            yield from self._skip_space()
            yield from self._accept(END)
            self._end_call()

    def _call(self) -> Steps[bool]:
        if not (yield from self._accept(FUNCTION)):
            return False
        name = yield from self._name_until(">")
        if name is None or not self._start_call(name):
            return False
        properties = self._tools[name].parameters.get("properties")
        before = "{"
        while True:
            yield from self._skip_space()
            if not (yield from self._accept(PARAMETER)):
                break
            key = yield from self._name_until(">")
            if key is None:
                return True
            self._add_arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key) if isinstance(properties, Mapping) else None
            if not (yield from self._parameter(schema)):
                return True
        if (yield from self._accept(END_FUNCTION)):
            self._add_arguments("{}" if before == "{" else "}")
        return True

    def _parameter(self, schema: object) -> Steps[bool]:
        """Read a value to the end of its tag, without the line breaks around it."""
        yield from self._accept("\n")
        ends = (f"\n{END_PARAMETER}", END_PARAMETER)
        if is_text(schema):
            self._add_arguments('"')
            end = yield from self._read_text(
                ends, lambda text: self._add_arguments(_quoted(text)[1:-1])
            )
            if end:
                self._add_arguments('"')
        else:
            taken: list[str] = []
            end = yield from self._read_text(ends, taken.append)
            if end:
                self._add_arguments(_to_json("".join(taken), _types(schema)))
        yield from self._accept(end)
        return bool(end)


def is_text(schema: object) -> bool:
    """Return whether a value of this schema is written as it is, and not as JSON."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object) -> frozenset[type]:
    """Return the types of the values that a schema allows; empty: not known."""
    if not isinstance(schema, Mapping):
        return frozenset()
    if (kinds := schema.get("type")) is not None:
        names = kinds if isinstance(kinds, list) else [kinds]
        return frozenset(kind for name in names for kind in _TYPES.get(name, ()))
    found = [_types(part) for part in schema.get("anyOf") or schema.get("oneOf") or ()]
    return frozenset().union(*found) if all(found) else frozenset()


def _to_json(text: str, types: Collection[type]) -> str:
    """Return the value as JSON. What is of another type than these is a string, if that is one of them."""
    read: list[tuple[type, str]] = []
    for parse in (json.loads, ast.literal_eval) if types else (json.loads,):
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            value = parse(text)
            read.append((type(value), json.dumps(value, ensure_ascii=False, allow_nan=False)))
    fitting = [made for kind, made in read if not types or kind in types]
    if not fitting and str not in types:
        fitting = [made for _, made in read]
    return fitting[0] if fitting else _quoted(text)
