"""Calls of Llama 3: the answer is {"name": ..., "parameters": {...}}, several with `;` between, perhaps after a tag."""

from __future__ import annotations

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.json_calls import JsonCallReader
from modelswarm_gateway.generation.tool_calls.reader import Steps

TAG = "<|python_tag|>"


class LlamaReader(JsonCallReader):
    @override
    def _parse(self) -> Steps[None]:
        yield from self._calls()
        while not self.has_ended and (yield from self._text_before_call(TAG)):
            yield from self._calls()

    def _calls(self) -> Steps[None]:
        """Read the calls that begin here; show what is none as text."""
        self._mark()
        yield from self._skip_space()
        yield from self._accept(TAG)
        yield from self._skip_space()
        if self._has_format and not self.calls and not (yield from self._begins_call()):
            return self._show_marked()
        while (yield from self._json_call()):
            if self._end_call():
                return
            self._mark()
            yield from self._skip_space(";,")
            if not (yield from self._is_next("{")):
                self._marked = None
                return
        self._show_marked()

    def _begins_call(self) -> Steps[bool]:
        """Return whether a call follows as the grammar writes it beside content that is JSON."""
        for name in self._tools:
            if (yield from self._is_next(f'{{"name":"{name}","parameters":')):
                return True
        return False
