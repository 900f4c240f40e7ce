"""Calls of Hermes, Qwen2.5 and Qwen3: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.json_calls import JsonCallReader
from modelswarm_gateway.generation.tool_calls.reader import Steps

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesReader(JsonCallReader):
    @override
    def _parse(self) -> Steps[None]:
        while not self.has_ended and (yield from self._text_before_call(BEGIN)):
            self._mark()
            self._take(len(BEGIN))
            yield from self._skip_space()
            if not (yield from self._json_call()):
                self._show_marked()
                continue
            yield from self._skip_space("}]")  # small models close too many brackets
            yield from self._accept(END)
            self._end_call()
