"""Resumption of a broken stream: the tokens of its turn, and the last one that the client has (R17, sampling).

Made by the service from the session's log, used by the generation. Pure: the text of a turn is a function of its log,
so the last position that the client has is enough.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from modelswarm.protocol.messages import Finish, Sampling, Turn
from modelswarm_gateway.backend.token_stream import TokenEvent
from modelswarm_gateway.core.interface.turn import ParkedTurn, TokenLogprobs
from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.generation.output.logprobs import TokenLogprob
from modelswarm_gateway.generation.tool_calls.events import OutputEvent

LAST_EVENT_ID = "Last-Event-ID"
_ID = re.compile(r"([0-9]{1,15})-([0-9a-f]{8})")
# Bytes of a log mark: a different log has the same mark once in 2^32.
_MARK_BYTES = 4
_NO_LOGPROBS = TokenLogprobs(0.0)


class LogMark:
    """Short hash of a log's tokens from its beginning: the mark in an event's id."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._hash = hashlib.blake2s(digest_size=_MARK_BYTES)
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._hash.update(struct.pack(f"<{len(tokens)}I", *tokens))

    def __str__(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, slots=True)
class ResumedTurn:
    prompt: tuple[int, ...]
    last_read: int  # position of the last token whose text the client has
    generated: tuple[int, ...]  # all tokens of the turn so far
    turn: Turn
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by position, as kept

    def sampling(self, own: Sampling) -> Sampling:
        """Return the parameters of the rest. `own`, of the request that resumes the turn, says what is reported.

        That changes no token: which ones are forced depends on the log, and not on how they travel.
        """
        grammar = self.turn.sampling.grammar
        if grammar is not None:
            most = 0 if own.grammar is None else own.grammar.max_forced
            grammar = replace(grammar, max_forced=min(grammar.max_forced, most))
        kept = self.turn.sampling
        return replace(kept, grammar=grammar, logprobs=own.logprobs, returned=own.returned)

    def token_events(self, first: int) -> list[TokenEvent]:
        """Return the generated tokens as events, the first at position `first`. The last one may end the turn."""
        made = []
        for position, token in enumerate(self.generated, first):
            finish = Finish.NONE
            if token in self.turn.sampling.eos:
                finish = Finish.STOP
            elif position + 1 >= self.turn.end:
                finish = Finish.LENGTH
            kept = self.logprobs.get(position, _NO_LOGPROBS)
            made.append(TokenEvent(position, token, finish, kept.logprob, kept.top))
        return made


@dataclass(frozen=True, slots=True)
class SeenAnswer:
    """The part of an answer that the client of a resumed turn has already."""

    output: tuple[OutputEvent, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


def format_event_id(position: int, mark: str) -> str:
    """Return the id of the event that covers the log up to and including `position`."""
    return f"{position}-{mark}"


def parse_event_id(value: str) -> tuple[int, str]:
    """Return the position in the id of a named session's event, and the mark of the log up to there. Raise ApiError."""
    found = _ID.fullmatch(value.strip())
    if found is None:
        raise invalid_request(
            LAST_EVENT_ID,
            f"{LAST_EVENT_ID}: {value[:40]!r} is not the id of an event in a stream with a session_id: POSITION-MARK",
        )
    return int(found[1]), found[2]


def resume_turn(
    prompt: Sequence[int],
    kept: ParkedTurn | None,
    after: int,
    mark: str,
    needs_logprobs: bool = False,
    needs_rows: bool = False,
) -> ResumedTurn:
    """Return the turn to resume; None for `kept` means that the session has no log.

    `needs_logprobs`: tokens that the client lacks are generated again if their log probabilities were lost with
    another gateway. `needs_rows`: they are generated again in any case, because no gateway keeps returned rows.

    Raise ApiError unless the client knows the log up to `after` (its mark) and the whole prompt of the turn. The mark
    is checked first, so that a client without it learns nothing about the log.
    """
    first = len(prompt)
    if after < first:
        detail = f"{after} is inside the prompt, which has {first} tokens"
        raise invalid_request(LAST_EVENT_ID, f"{LAST_EVENT_ID}: {detail}")
    if kept is None or after >= len(kept.tokens):
        detail = f"this session is no longer kept up to what was sent ({after + 1} tokens); ask again, as a new turn"
        raise ApiError(Code.SESSION_LOST, detail, param="session_id")
    if str(LogMark(kept.tokens[: after + 1])) != mark:
        detail = (
            "the log of this session differs from what was sent: it has answered another request"
        )
        raise ApiError(Code.SESSION_LOST, detail, param="session_id")
    if kept.turn.begin != first or kept.tokens[:first] != tuple(prompt):
        raise invalid_request(
            LAST_EVENT_ID, f"{LAST_EVENT_ID}: this session has answered another prompt"
        )
    end = len(kept.tokens)
    if needs_logprobs:
        end = next((at for at in range(after + 1, end) if at not in kept.logprobs), end)
    if needs_rows:
        end = after + 1
    return ResumedTurn(tuple(prompt), after, kept.tokens[first:end], kept.turn, kept.logprobs)
