"""Stored responses: what clients may read again, and the items with which a conversation goes on.

In this gateway's memory, within limits of number, size and age; the oldest are forgotten first. The KV of a
conversation is a named session, which has limits of its own: a response may outlive it, and is then computed anew.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from modelswarm_gateway.api.responses.response_ids import ResponseId

MAX_RESPONSES = 10_000
MAX_BYTES = 64 << 20  # of all stored responses, as JSON
MAX_AGE = 3600.0  # seconds
Item = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: ResponseId
    body: Mapping[str, Any]  # the response as its client got it
    inputs: (
        Sequence[Item] | None
    )  # of the whole conversation before it; None: only the log has them

    @property
    def items(self) -> Sequence[Item] | None:
        """Return all items of the conversation; None if only the session's log has them."""
        return None if self.inputs is None else [*self.inputs, *self.body["output"]]


@dataclass(frozen=True, slots=True)
class _Entry:
    id: ResponseId
    content: bytes  # JSON of body and inputs: as objects they may take 26 times the memory
    stored_at: float


class StoredResponses:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # oldest first
        self._bytes = 0
        self._heads: dict[str, str] = {}  # conversation -> id of its last response
        self._continued: set[str] = set()  # conversations whose session answers now

    def keep(self, response: StoredResponse) -> None:
        """Store a response; it is the last one of its conversation. One that is larger than all room is not stored."""
        self.remove(response.id)
        content = json.dumps([response.body, response.inputs]).encode()
        if len(content) > MAX_BYTES:
            return
        self._entries[str(response.id)] = _Entry(response.id, content, self._clock())
        self._heads[response.id.conversation] = str(response.id)
        self._bytes += len(content)
        while self._bytes > MAX_BYTES or len(self._entries) > MAX_RESPONSES:
            self._drop(next(iter(self._entries)))

    def find(self, response_id: ResponseId) -> StoredResponse | None:
        self._drop_old()
        entry = self._entries.get(str(response_id))
        return None if entry is None else StoredResponse(entry.id, *json.loads(entry.content))

    def remove(self, response_id: ResponseId) -> bool:
        """Forget a response; return False if it is not stored."""
        self._drop_old()
        return self._drop(str(response_id))

    def is_last(self, response_id: ResponseId) -> bool:
        """Return whether no later response of its conversation is stored."""
        return self._heads.get(response_id.conversation) == str(response_id)

    def claim(self, response_id: ResponseId) -> bool:
        """Reserve the session of a conversation for the answer behind this response, until `unclaim`.

        Return False if the session is not at this response: the conversation went on, or goes on right now.
        """
        conversation = response_id.conversation
        if not self.is_last(response_id) or conversation in self._continued:
            return False
        self._continued.add(conversation)
        return True

    def unclaim(self, response_id: ResponseId) -> None:
        self._continued.discard(response_id.conversation)

    def _drop_old(self) -> None:
        oldest = self._clock() - MAX_AGE
        while self._entries and (first := next(iter(self._entries.items())))[1].stored_at < oldest:
            self._drop(first[0])

    def _drop(self, name: str) -> bool:
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._bytes -= len(entry.content)
        conversation = entry.id.conversation
        if self._heads.get(conversation) == name:
            del self._heads[conversation]
        return True
