"""GPT-OSS's harmony format: messages on the channels analysis, commentary and final; a call is a message to a function.

The prompt ends with <|start|>assistant, so the text begins inside a message's header.
"""

from __future__ import annotations

import re

from typing_extensions import override

from modelswarm_gateway.generation.tool_calls.reader import OutputReader, Steps

CHANNEL, MESSAGE, CONSTRAIN = "<|channel|>", "<|message|>", "<|constrain|>"
START, ENDS = "<|start|>", ("<|end|>", "<|call|>", "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=functions\.([\w.-]+)")


class HarmonyReader(OutputReader):
    @override
    def _read(self) -> Steps[None]:
        while not self.has_ended:
            self._mark()
            header = yield from self._name_until(MESSAGE)
            if header is None:
                self._show_marked()
                if not (yield from self._read_text((START,))):
                    break
                continue
            yield from self._body(header)
            if not (yield from self._peek()):
                break
        if self._space and not self.calls:
            self._show_at_once(self._space)

    def _body(self, header: str) -> Steps[None]:
        """Read a message, and go behind its end."""
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        is_call = recipient is not None and self._start_call(recipient[1])
        self._marked = None
        self.is_reasoning = not is_call and channel is not None and channel[1] == "analysis"
        sink = (
            self._add_arguments
            if is_call
            else self._show_reasoning
            if self.is_reasoning
            else self._show
        )
        # Content with a format is the last message, and may spell the ends of messages.
        is_content = self._has_format and not is_call and not self.is_reasoning
        ends = () if is_content else (*ENDS, START)
        end = yield from self._read_text(ends, sink)
        if self.is_reasoning:
            self._space = ""
        self.is_reasoning = False
        if end != START:
            yield from self._accept(end)
        if is_call:
            self._end_call()
