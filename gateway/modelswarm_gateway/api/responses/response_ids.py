"""Ids of responses: they name the session that keeps the conversation, and the turn that made the response.

Any gateway can read an id and find the session by it. The session's log proves whether its last turn is the one of the
id. So the KV of a stored response is found after the loss of the gateway that has stored it.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ID = re.compile(r"resp_([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{8})([0-9a-f]{24})([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class ResponseId:
    model: str  # mark of the model's name
    context: str  # mark of what stands before the conversation: instructions, tools
    created: int  # unix seconds
    conversation: str  # names the session
    turn: str  # mark of the turn, a function of the session's log

    @property
    def session_id(self) -> str:
        return f"conv_{self.conversation}"

    def __str__(self) -> str:
        return f"resp_{self.model}{self.context}{self.created:08x}{self.conversation}{self.turn}"

    def item_id(self, prefix: str, index: int) -> str:
        """Return the id of an item of this response: the same one at each gateway that writes it."""
        digest = hashlib.blake2s(f"{self}/{index}".encode(), digest_size=12)
        return f"{prefix}_{digest.hexdigest()}"


def parse_response_id(text: str) -> ResponseId | None:
    """Return the id; None if `text` is no id of a response here."""
    found = _ID.fullmatch(text)
    if found is None:
        return None
    model, context, created, conversation, turn = found.groups()
    return ResponseId(model, context, int(created, 16), conversation, turn)


def model_mark(model: str) -> str:
    return hashlib.blake2s(model.encode(), digest_size=4).hexdigest()


def context_mark(
    instructions: str | None, tools: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
) -> str:
    """Return the mark of what a chat template writes before the conversation."""
    content = json.dumps([instructions, list(tools), dict(variables)], sort_keys=True)
    return hashlib.blake2s(content.encode(), digest_size=4).hexdigest()


def turn_mark(prompt: Sequence[int], seed: int) -> str:
    """Return the mark of a turn that has answered this prompt with this seed."""
    digest = hashlib.blake2s(struct.pack(f"<{len(prompt)}I", *prompt), digest_size=8)
    digest.update(struct.pack("<Q", seed & (1 << 64) - 1))
    return digest.hexdigest()
