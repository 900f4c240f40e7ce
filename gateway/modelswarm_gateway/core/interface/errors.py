"""Errors raised by the core for calls that it cannot accept.

Mapped to HTTP and gRPC by `modelswarm_gateway/errors.py`. What servers send never raises.
"""

from __future__ import annotations


class CoreError(Exception):
    """A call that the core cannot accept; the message is for the client."""


class UnknownSession(CoreError):
    """There is no session of that name here."""


class SessionBusy(CoreError):
    """The session is open already, or a turn of it is running."""


class PromptTooLong(CoreError):
    """The prompt does not fit into the model's context, or into a session with a `max_length`."""

    def __init__(self, length: int, limit: int, holder: str = "this model's context") -> None:
        # Claude Code and LiteLLM know an overflow by the words "prompt is too long" only.
        super().__init__(f"the prompt is too long: it has {length} tokens; {holder} holds {limit}")
        self.length, self.limit = length, limit
