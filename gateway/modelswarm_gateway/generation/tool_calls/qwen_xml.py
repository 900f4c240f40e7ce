"""Calls of Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>.

The arguments become JSON. A value that the tool's schema calls a string is passed on as it arrives. Any other value is
JSON if it can be read as such, else a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.reader import OutputReader, Steps

BEGIN, END = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"


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
            if not (yield from self._parameter(is_text(schema))):
                return True
        if (yield from self._accept(END_FUNCTION)):
            self._add_arguments("{}" if before == "{" else "}")
        return True

    def _parameter(self, is_text: bool) -> Steps[bool]:
        """Read a value to the end of its tag, without the line breaks around it."""
        yield from self._accept("\n")
        ends = (f"\n{END_PARAMETER}", END_PARAMETER)
        if is_text:
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
                self._add_arguments(_to_json("".join(taken)))
        yield from self._accept(end)
        return bool(end)


def is_text(schema: object) -> bool:
    """Return whether a value of this schema is written as it is, and not as JSON."""
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _to_json(text: str) -> str:
    """Return the value as JSON; what cannot be read becomes a string."""
    value: Any = text
    try:
        value = json.loads(text)
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return _quoted(text)
