"""Calls of Mistral: [TOOL_CALLS] before a JSON list of calls, or before each NAME[ARGS]{...} of newer models."""

from __future__ import annotations

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.json_calls import JsonCallReader
from modelswarm_gateway.generation.tool_calls.reader import Steps

BEGIN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralReader(JsonCallReader):
    @override
    def _parse(self) -> Steps[None]:
        while not self.has_ended and (yield from self._text_before_call(BEGIN)):
            self._mark()
            self._take(len(BEGIN))
            yield from self._skip_space()
            if (yield from self._accept("[")):
                is_call = yield from self._list()
            elif (yield from self._is_next("{")):
                is_call = yield from self._json_call()
                if is_call:
                    self._end_call()
            else:
                is_call = yield from self._named_call()
            if not is_call:
                self._show_marked()

    def _list(self) -> Steps[bool]:
        """Read the calls of a list, up to its end or the first entry that is none."""
        while True:
            yield from self._skip_space()
            if not (yield from self._json_call()):
                return False
            if self._end_call():
                return True
            self._mark()
            yield from self._skip_space()
            if not (yield from self._accept(",")):
                break
        yield from self._accept("]")
        self._marked = None
        return True

    def _named_call(self) -> Steps[bool]:
        name = yield from self._identifier()
        if (yield from self._accept(CALL_ID)):
            yield from self._identifier()
        yield from self._accept(ARGS)
        yield from self._skip_space()
        if not (yield from self._is_next("{")) or not self._start_call(name):
            return False
        yield from self._value(self._add_arguments)
        self._end_call()
        return True
