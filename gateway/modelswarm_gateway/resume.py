"""Where a stream that broke off goes on: what its turn had generated, and what the client has of it (R17).

Made by the service from the session's log, used by the generation. Pure: the text of a turn is a function of its log,
so it is enough to know up to which position the client was told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import Finish, Turn
from modelswarm_gateway.core.effects import KeptTurn
from modelswarm_gateway.engine import TokenEvent
from modelswarm_gateway.errors import ApiError, Code, invalid

HEADER = "Last-Event-ID"
_ID = re.compile(r"(?:0:)?([0-9]{1,15})")


@dataclass(frozen=True, slots=True)
class Resumed:
    after: int  # position of the last token whose text the client has
    generated: tuple[int, ...]  # all that the turn had made
    turn: Turn

    def events(self, first: int) -> list[TokenEvent]:
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


def parse_id(said: str) -> int:
    """The position that an event's id names. Raises ApiError."""
    found = _ID.fullmatch(said.strip())
    if found is None:
        raise invalid(HEADER, f"{HEADER}: {said[:40]!r} is no id of an event of a stream")
    return int(found[1])


def resumed(prompt: Sequence[int], kept: KeptTurn | None, after: int) -> Resumed | None:
    """None: nothing was generated yet, and the client was told nothing. Raises ApiError."""
    first = len(prompt)
    log = () if kept is None else kept.tokens
    common = min(first, len(log))
    if after < first - 1:
        detail = f"{after} lies in the prompt, which has {first} tokens"
        raise invalid(HEADER, f"{HEADER}: {detail}")
    if log[:common] != tuple(prompt[:common]):
        raise invalid(HEADER, f"{HEADER}: this session has answered another prompt")
    if after >= max(first, len(log)):
        detail = f"of this session {len(log)} tokens are left, fewer than were sent ({after + 1})"
        raise ApiError(Code.SESSION_LOST, detail, param="session_id")
    if kept is None or len(log) <= first:
        return None
    return Resumed(after, log[first:], kept.turn)
