"""Calls of DeepSeek: V3 and R1 write the arguments as a code block, V3.1 right behind the name."""

from __future__ import annotations

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.json_calls import JsonCallReader
from modelswarm_gateway.generation.tool_calls.reader import Steps

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


class DeepSeekReader(JsonCallReader):
    @override
    def _parse(self) -> Steps[None]:
        while not self.has_ended and (yield from self._text_before_call(BEGIN)):
            self._mark()
            self._take(len(BEGIN))
            yield from self._skip_space()
            while (yield from self._accept(CALL_BEGIN)):
                if not (yield from self._call()):
                    break
                if self._end_call():
                    return
                self._mark()
                yield from self._skip_space()
            else:
                if (yield from self._accept(END)):
                    self._marked = None
            self._show_marked()

    def _call(self) -> Steps[bool]:
        """Read a call: NAME, separator, arguments; or `function`, separator, NAME, and a block of JSON."""
        name = yield from self._name_until(SEPARATOR)
        if name is None:
            return False
        yield from self._skip_space()
        is_block = not (yield from self._is_next("{"))
        if is_block:
            name = yield from self._name_until("\n")
            yield from self._skip_space()
            if name is None or not (yield from self._accept(f"{FENCE}json")):
                return False
            yield from self._skip_space()
        if not (yield from self._is_next("{")) or not self._start_call(name.strip()):
            return False
        yield from self._value(self._add_arguments)
        yield from self._skip_space()
        if is_block:
            yield from self._accept(FENCE)
            yield from self._skip_space()
        yield from self._accept(CALL_END)
        return True
