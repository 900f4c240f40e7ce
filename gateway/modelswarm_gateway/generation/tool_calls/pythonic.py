"""Calls of Llama 4 and small Llama 3.2 models: a Python list of calls, [name(key=value, ...), ...].

The arguments become JSON, one fragment per value, because a value's form is known only at its end.
"""

from __future__ import annotations

import ast
import json

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.reader import OutputReader, Steps

BEGIN, END = "<|python_start|>", "<|python_end|>"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicReader(OutputReader):
    @override
    def _parse(self) -> Steps[None]:
        yield from self._calls()
        while not self.has_ended and (yield from self._text_before_call(BEGIN)):
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        """Read the list that begins here; show what is none as text."""
        self._mark()
        yield from self._skip_space()
        yield from self._accept(BEGIN)
        yield from self._skip_space()
        if not (yield from self._accept("[")):
            return self._show_marked()
        while (yield from self._call()):
            if self._end_call():
                return
            self._mark()
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                yield from self._accept("]")
                yield from self._accept(END)
                self._marked = None
                return
        self._show_marked()

    def _call(self) -> Steps[bool]:
        yield from self._skip_space()
        name = yield from self._identifier()
        if not (yield from self._accept("(")) or not self._start_call(name):
            return False
        before = "{"
        while True:
            yield from self._skip_space(",")
            if (yield from self._accept(")")):
                self._add_arguments("{}" if before == "{" else "}")
                return True
            key = yield from self._identifier()
            yield from self._skip_space()
            if not key or not (yield from self._accept("=")):
                return True
            value = yield from self._value_text()
            if value is None:
                return True
            self._add_arguments(f"{before}{json.dumps(key)}: {_to_json(value)}")
            before = ", "

    def _value_text(self) -> Steps[str | None]:
        """Return the value up to the comma or bracket behind it; None if the text ends inside."""
        taken: list[str] = []
        closing: list[str] = []
        while character := (yield from self._peek()):
            if not closing and character in ",)":
                return "".join(taken)
            if character in "'\"":
                if not (yield from self._quoted(taken)):
                    return None
                continue
            if character in _CLOSING:
                closing.append(_CLOSING[character])
            elif closing and character == closing[-1]:
                closing.pop()
            taken.append(self._take())
        return None

    def _quoted(self, taken: list[str]) -> Steps[bool]:
        quote = self._take()
        taken.append(quote)
        while character := (yield from self._peek()):
            taken.append(self._take())
            if character == "\\":
                if not (yield from self._peek()):
                    return False
                taken.append(self._take())
            elif character == quote:
                return True
        return False


def _to_json(text: str) -> str:
    """Return the value as JSON. What is neither JSON nor a Python literal becomes a string.

    JSON is first, as grammars write it: a text that both can read may have another meaning in Python.
    """
    text = text.strip()
    for parse in (json.loads, ast.literal_eval):
        try:
            return json.dumps(parse(text), ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
    return json.dumps(text, ensure_ascii=False)
