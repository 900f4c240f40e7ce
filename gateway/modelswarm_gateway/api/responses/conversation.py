"""The turn of a conversation: which session it runs on, and with which prompt.

A stored response is continued on its session: only what is new is computed. Where that cannot be, because another
request has continued it already, or the chat template cannot append messages, the whole conversation is the prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from modelswarm_gateway.api.responses.requests import Item, ResponsesRequest
from modelswarm_gateway.api.responses.response_ids import (
    ResponseId,
    model_mark,
    parse_response_id,
    turn_mark,
)
from modelswarm_gateway.api.responses.stored_responses import StoredResponse, StoredResponses
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.errors import ApiError, Code, shorten
from modelswarm_gateway.generation.request import GenerationRequest

_CONVERSATION_BYTES = 12
# Refusals after which the conversation goes on in a new session.
_NOT_THERE = (Code.RESPONSE_NOT_FOUND, Code.SESSION_EXPIRED, Code.SESSION_LOST, Code.SESSION_BUSY)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way to run the turn."""

    request: GenerationRequest
    conversation: str  # of the response that it makes
    only_elsewhere: str = ""  # why it cannot run at this gateway; "": it can


@dataclass(frozen=True, slots=True)
class Turn:
    """The attempts at one turn, tried in their order."""

    attempts: tuple[Attempt, ...]
    known: (
        Sequence[Item] | None
    ) = ()  # items of the conversation before it; None: only a log has them
    continues: ResponseId | None = (
        None  # on whose session the first attempts are, if it is reserved
    )
    asks_owner: bool = False  # another gateway may know more of the conversation

    def next_attempt(self, error: ApiError) -> Turn | None:
        """Return the turn with the attempts that may succeed after this refusal of the first one; None without any."""
        if error.code in _NOT_THERE:
            return self.on_other_sessions(self.attempts[0].conversation)
        if error.code is Code.INVALID_REQUEST and len(self.attempts) > 1:
            return replace(self, attempts=self.attempts[1:])
        return None

    def on_other_sessions(self, conversation: str) -> Turn | None:
        """Return the turn without the attempts on one session; None if none is left."""
        rest = tuple(each for each in self.attempts if each.conversation != conversation)
        return replace(self, attempts=rest, continues=None) if rest else None


def not_found(name: str, detail: str) -> ApiError:
    message = f"previous_response_id: {shorten(name)!r} {detail}; send the whole input without it"
    return ApiError(Code.RESPONSE_NOT_FOUND, message, param="previous_response_id")


def plan_turn(request: ResponsesRequest, stored: StoredResponses) -> Turn:
    """Return the turn of a new request. Raise ApiError."""
    name = request.body.previous_response_id
    if name is None:
        return Turn((_on_new_session(request, request.whole()),))
    before = parse_response_id(name)
    if before is None:
        raise not_found(name, "is the id of no response here")
    found = stored.find(before)
    if found is None:
        return _behind_unknown(request, before)
    return _behind_known(request, found, stored)


def _behind_known(
    request: ResponsesRequest, found: StoredResponse, stored: StoredResponses
) -> Turn:
    items, before = found.items, found.id
    whole = None if items is None else request.whole(items)
    attempts = []
    is_same_model = before.model == model_mark(request.body.model)
    continues = request.is_stored and is_same_model and stored.is_last(before)
    if continues and before.context == request.context:
        attempts.append(_on_session(_appended(request, before), before))
    if whole is not None:
        attempts += [_on_session(whole, before)] if continues else []
        attempts.append(_on_new_session(request, whole))
    if not attempts:
        detail = "is known only by the log of its session, which cannot be used for this request"
        raise not_found(str(before), detail)
    return Turn(tuple(attempts), items, before if continues else None)


def _behind_unknown(request: ResponsesRequest, before: ResponseId) -> Turn:
    """Return the turn behind a response of another gateway: that one answers, or the session's log is enough."""
    if before.model != model_mark(request.body.model):
        raise not_found(str(before), "is not stored at this gateway for another model")
    only_elsewhere = ""
    if not request.is_stored:
        only_elsewhere = "can be continued without store only by the gateway that has stored it"
    elif before.context != request.context:
        only_elsewhere = (
            "is known only by the log of its session, which goes on with the same instructions, tools and "
            "reasoning effort only"
        )
    attempt = _on_session(_appended(request, before), before)
    return Turn((replace(attempt, only_elsewhere=only_elsewhere),), known=None, asks_owner=True)


def plan_resumed_turn(
    request: ResponsesRequest, response: ResponseId, stored: StoredResponses
) -> Turn:
    """Return the turn that resumes the stream of `response`. Raise ApiError."""
    name = request.body.previous_response_id
    if name is None:
        return Turn((_on_session(request.whole(), response),))
    before = parse_response_id(name)
    found = None if before is None else stored.find(before)
    items = None if found is None else found.items
    attempts = [_on_session(request.appended(), response)]
    if items is not None:
        attempts.append(_on_session(request.whole(items), response))
    return Turn(tuple(attempts), items, asks_owner=items is None)


def _appended(request: ResponsesRequest, before: ResponseId) -> GenerationRequest:
    return replace(request.appended(), check_last_turn=partial(_check_turn, before))


def _check_turn(before: ResponseId, kept: ParkedTurn | None) -> None:
    """Raise ApiError unless the session's last turn has made this response."""
    if kept is None:
        raise not_found(str(before), "is stored no more")
    prompt = kept.tokens[: kept.turn.begin]
    if turn_mark(prompt, kept.turn.sampling.seed) != before.turn:
        raise not_found(str(before), "is not the last response of its conversation any more")


def _on_session(request: GenerationRequest, response: ResponseId) -> Attempt:
    return Attempt(replace(request, session_id=response.session_id), response.conversation)


def _on_new_session(request: ResponsesRequest, generation: GenerationRequest) -> Attempt:
    conversation = secrets.token_hex(_CONVERSATION_BYTES)
    if request.is_stored:
        generation = replace(generation, session_id=f"conv_{conversation}")
    return Attempt(generation, conversation)
