"""Output items of one response, built from the events of its answer, and the stream events that show them growing.

The events follow OpenAI's order: an item is added, its part is added, deltas, and all of them are done. Knows neither
sessions nor HTTP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modelswarm_gateway.api.responses.response_ids import ResponseId
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    merge_events,
)

Event = dict[str, Any]
_COMPLETED, _INCOMPLETE = "completed", "incomplete"


class OutputItems:
    """`items` has all items, the last of which may still grow."""

    def __init__(self, response_id: ResponseId) -> None:
        self.items: list[dict[str, Any]] = []
        self._id = response_id
        self._is_open = False  # the last item may grow

    def add_output(
        self, output: Sequence[OutputEvent], logprobs: Sequence[Any] = ()
    ) -> list[Event]:
        """Add a part of the answer; return its stream events. `logprobs`: entries of its text."""
        made: list[Event] = []
        for event in merge_events(output):
            match event:
                case TextDelta(text) if text or logprobs:
                    made += self._open("message")
                    made += self._grow("output_text", text, list(logprobs))
                    logprobs = ()
                case ReasoningDelta(text):
                    made += self._open("reasoning")
                    made += self._grow("reasoning_text", text)
                case ToolCallStart(_, name, call_id):
                    made += self._start_call(name, call_id)
                case ToolCallArguments(_, text):
                    item = self.items[-1]
                    item["arguments"] += text
                    made.append(self._of_item("response.function_call_arguments.delta", delta=text))
        return made

    def finish(self, *, is_complete: bool) -> list[Event]:
        """End the last item; return its stream events. An answer without anything is an empty message."""
        made = [] if self.items else self._open("message")
        return made + self._close(_COMPLETED if is_complete else _INCOMPLETE)

    def _open(self, kind: str) -> list[Event]:
        """Begin a message or a reasoning with one empty part, unless the last item is one that grows."""
        if self._is_open and self.items[-1]["type"] == kind:
            return []
        made = self._close(_COMPLETED)
        if kind == "message":
            item = {"role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        made.append(self._begin(kind, item))
        made.append(self._of_part("response.content_part.added", part=_copy(part)))
        self.items[-1]["content"].append(part)
        return made

    def _begin(self, kind: str, fields: dict[str, Any]) -> Event:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        item_id = self._id.item_id(prefix, len(self.items))
        self.items.append({"id": item_id, "type": kind, "status": "in_progress", **fields})
        self._is_open = True
        return self._of_output("response.output_item.added", item=_copy(self.items[-1]))

    def _start_call(self, name: str, call_id: str) -> list[Event]:
        made = self._close(_COMPLETED)
        fields = {"call_id": call_id, "name": name, "arguments": ""}
        return [*made, self._begin("function_call", fields)]

    def _grow(self, kind: str, text: str, logprobs: list[Any] | None = None) -> list[Event]:
        part = self.items[-1]["content"][-1]
        part["text"] += text
        scores = {}
        if logprobs is not None:
            part["logprobs"] += logprobs
            scores["logprobs"] = logprobs
        return [self._of_part(f"response.{kind}.delta", delta=text, **scores)]

    def _close(self, status: str) -> list[Event]:
        if not self._is_open:
            return []
        item, made = self.items[-1], []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            made.append(self._of_item("response.function_call_arguments.done", **done))
        else:
            part = item["content"][-1]
            shown = {"text": part["text"]}
            if item["type"] == "message":
                shown["logprobs"] = list(part["logprobs"])
            made.append(self._of_part(f"response.{part['type']}.done", **shown))
            made.append(self._of_part("response.content_part.done", part=_copy(part)))
        item["status"], self._is_open = status, False
        return [*made, self._of_output("response.output_item.done", item=_copy(item))]

    def _of_output(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._of_output(kind, item_id=self.items[-1]["id"], **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """Return the item as it is now; events must not change when it grows."""
    lists = {name: list(value) for name, value in item.items() if isinstance(value, list)}
    return {**item, **lists}
