"""Remarks on an answer that ended for its length. Used by `chat` and `generate`."""

from __future__ import annotations

from collections.abc import Mapping

from modelswarm.cli.terminal.names import count_of

LENGTH = "length"  # finish reason of an answer that did not come to its own end
NEW_CONVERSATION = "/new starts a new conversation"


def length_remark(usage: Mapping[str, int], context: int | None, *, in_chat: bool = False) -> str:
    """Return why an answer ended for its length. `context`: positions of the model's context, if known."""
    if context is not None and usage.get("total_tokens", 0) >= context:
        advice = f": {NEW_CONVERSATION}" if in_chat else ""
        return f"(the model's context of {count_of(context, 'token')} is full{advice})"
    stopped_after = count_of(usage.get("completion_tokens", 0), "token")
    return f"(stopped after {stopped_after}; --max-tokens N allows more)"
