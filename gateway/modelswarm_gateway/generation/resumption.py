"""Where a stream that broke off goes on: what its turn had generated, and what the client has of it (R17).

Made by the service from the session's log, used by the generation. Pure: the text of a turn is a function of its log,
so it is enough to know up to which position the client was told.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import Finish, Turn
from modelswarm_gateway.backend.token_stream import TokenEvent
from modelswarm_gateway.core.interface.turn import KeptTurn
from modelswarm_gateway.errors import ApiError, Code, invalid_request

LAST_EVENT_ID = "Last-Event-ID"
_ID = re.compile(r"(?:0:)?([0-9]{1,15})(?:-([0-9a-f]{8}))?")
_MARK_BYTES = 4  # one log in 2^32 that is another one passes for it


class LogMark:
    """A short hash of a log's tokens, which are told from its begin on: the mark of an event's id."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._hash = hashlib.blake2s(digest_size=_MARK_BYTES)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._hash.update(struct.pack(f"<{len(tokens)}I", *tokens))

    def __str__(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class ResumedTurn:
    last_read: int  # position of the last token whose text the client has
    generated: tuple[int, ...]  # all that the turn had made
    turn: Turn

    def token_events(self, first: int) -> list[TokenEvent]:
        """What was generated, `first` being the position of its first token; the last one may be the end."""
        made = []
        for position, token in enumerate(self.generated, first):
            finish = Finish.NONE
            if token in self.turn.sampling.eos:
                finish = Finish.STOP
            elif position + 1 >= self.turn.end:
                finish = Finish.LENGTH
            made.append(TokenEvent(position, token, finish))
        return made


def format_event_id(position: int, mark: str) -> str:
    """Of the event that covers the log up to and with `position`."""
    return f"{position}-{mark}" if mark else str(position)


def parse_event_id(said: str) -> tuple[int, str]:
    """The position that an event's id names, and the mark of the log up to there; "" without one. Raises ApiError."""
    found = _ID.fullmatch(said.strip())
    if found is None:
        raise invalid_request(
            LAST_EVENT_ID, f"{LAST_EVENT_ID}: {said[:40]!r} is no id of an event of a stream"
        )
    return int(found[1]), found[2] or ""


def check_mark(log: Sequence[int], after: int, mark: str) -> None:
    """Raises ApiError if this is not the log, or not all of it, that the client has read of up to `after`."""
    if after >= len(log):
        raise _log_too_short(log, after)
    if str(LogMark(log[: after + 1])) != mark:
        detail = "what is left of this session is not what was sent: it has answered something else"
        raise ApiError(Code.SESSION_LOST, detail, param="session_id")


def _log_too_short(log: Sequence[int], after: int) -> ApiError:
    detail = f"of this session {len(log)} tokens are left, fewer than were sent ({after + 1})"
    return ApiError(Code.SESSION_LOST, detail, param="session_id")


def resume_turn(
    prompt: Sequence[int], kept: KeptTurn | None, after: int, mark: str = ""
) -> ResumedTurn | None:
    """None: nothing was generated yet, and the client was told nothing. Raises ApiError."""
    first = len(prompt)
    log = () if kept is None else kept.tokens
    common = min(first, len(log))
    if after < first - 1:
        detail = f"{after} lies in the prompt, which has {first} tokens"
        raise invalid_request(LAST_EVENT_ID, f"{LAST_EVENT_ID}: {detail}")
    if mark:
        check_mark(log, after, mark)
    if log[:common] != tuple(prompt[:common]):
        raise invalid_request(
            LAST_EVENT_ID, f"{LAST_EVENT_ID}: this session has answered another prompt"
        )
    if after >= max(first, len(log)):
        raise _log_too_short(log, after)
    if kept is None or len(log) <= first:
        return None
    return ResumedTurn(after, log[first:], kept.turn)
