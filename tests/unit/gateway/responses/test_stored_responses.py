"""Stored responses, the ids that name them, and the turns that continue them."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from modelswarm.protocol.messages import Sampling, Turn
from modelswarm_gateway.api.responses import stored_responses
from modelswarm_gateway.api.responses.conversation import Turn as PlannedTurn
from modelswarm_gateway.api.responses.conversation import plan_turn
from modelswarm_gateway.api.responses.input_list import list_items, read_page
from modelswarm_gateway.api.responses.requests import ResponsesRequest, parse_responses
from modelswarm_gateway.api.responses.response_ids import (
    ResponseId,
    model_mark,
    parse_response_id,
    turn_mark,
)
from modelswarm_gateway.api.responses.stored_responses import StoredResponse, StoredResponses
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.errors import ApiError, Code

PROMPT, SEED = (1, 2, 3), 9
USER = {"role": "user", "content": "hi"}
ANSWER = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def request_of(before: object = None, **body: Any) -> ResponsesRequest:
    named = {} if before is None else {"previous_response_id": str(before)}
    return parse_responses({"model": "m", "input": "more", **named, **body})


def id_of(conversation: str = "c" * 24, seed: int = SEED, model: str = "m") -> ResponseId:
    context = request_of().context
    return ResponseId(model_mark(model), context, 5, conversation, turn_mark(PROMPT, seed))


def response(response_id: ResponseId, inputs: Any = (USER,)) -> StoredResponse:
    return StoredResponse(response_id, {"id": str(response_id), "output": [ANSWER]}, inputs)


def kept(seed: int = SEED) -> ParkedTurn:
    turn = Turn(reserved_positions=9, end=9, sampling=Sampling(seed=seed), begin=len(PROMPT))
    return ParkedTurn((*PROMPT, 4, 5), turn)


def appends(turn: PlannedTurn) -> list[bool]:
    return [attempt.request.append for attempt in turn.attempts]


def test_id_is_read_as_it_was_written() -> None:
    assert parse_response_id(str(id_of())) == id_of()
    assert parse_response_id("resp_123") is None
    assert id_of().item_id("msg", 0) == id_of().item_id("msg", 0) != id_of().item_id("msg", 1)


def test_oldest_is_forgotten_beyond_each_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    stored = StoredResponses(clock)
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 2)
    ids = [id_of(f"{n:024x}") for n in range(3)]
    for each in ids:
        stored.keep(response(each))
    assert [stored.find(each) is not None for each in ids] == [False, True, True]

    monkeypatch.setattr(stored_responses, "MAX_BYTES", 1000)
    stored.keep(response(ids[0], [{"role": "user", "content": "x" * 700}]))
    assert [stored.find(each) is not None for each in ids] == [True, False, False]
    stored.keep(response(ids[1], [{"role": "user", "content": "x" * 1000}]))
    assert stored.find(ids[1]) is None

    clock.now = stored_responses.MAX_AGE + 1
    assert stored.find(ids[0]) is None


def test_stored_response_takes_the_memory_of_its_json() -> None:
    stored, item = StoredResponses(Clock()), {"role": "user", "content": "x" * 100, "id": [[]] * 9}
    before = sys.getrefcount(item)
    stored.keep(response(id_of(), [item]))
    assert sys.getrefcount(item) == before
    found = stored.find(id_of())
    assert found is not None and found.items == [item, ANSWER]


def test_one_answer_at_a_time_continues_a_session() -> None:
    stored, first = StoredResponses(Clock()), id_of()
    stored.keep(response(first))
    assert stored.claim(first)
    assert not stored.claim(first)
    stored.unclaim(first)
    assert stored.claim(first)
    stored.unclaim(first)
    stored.keep(response(id_of(seed=1)))
    assert not stored.claim(first)


def test_new_conversation_has_a_session_unless_it_is_not_stored() -> None:
    stored = StoredResponses(Clock())
    (attempt,) = plan_turn(request_of(), stored).attempts
    assert attempt.request.session_id == f"conv_{attempt.conversation}"
    (attempt,) = plan_turn(request_of(store=False), stored).attempts
    assert attempt.request.session_id is None


def test_known_response_is_continued_on_its_session_first() -> None:
    stored, before = StoredResponses(Clock()), id_of()
    stored.keep(response(before))
    turn = plan_turn(request_of(before), stored)
    assert appends(turn) == [True, False, False]
    sessions = [attempt.request.session_id for attempt in turn.attempts]
    assert sessions[:2] == [before.session_id] * 2 and sessions[2] not in sessions[:2]

    other = plan_turn(request_of(before, instructions="be brief"), stored)
    assert appends(other) == [False, False]
    assert appends(plan_turn(request_of(before, store=False), stored)) == [False]
    assert appends(plan_turn(request_of(before, model="n"), stored)) == [False]
    stored.keep(response(id_of(seed=1)))
    assert appends(plan_turn(request_of(before), stored)) == [False]


def test_next_attempt_depends_on_the_refusal() -> None:
    stored, before = StoredResponses(Clock()), id_of()
    stored.keep(response(before))
    turn = plan_turn(request_of(before), stored)
    template = turn.next_attempt(ApiError(Code.INVALID_REQUEST, "cannot append"))
    assert template is not None and template.attempts[0].request.session_id == before.session_id
    gone = turn.next_attempt(ApiError(Code.SESSION_EXPIRED, "gone"))
    assert gone is not None and gone.attempts == turn.attempts[2:]
    assert turn.next_attempt(ApiError(Code.NO_CAPACITY, "full")) is None
    assert gone.next_attempt(ApiError(Code.INVALID_REQUEST, "bad")) is None


def test_unknown_response_is_continued_by_its_log_only() -> None:
    stored, before = StoredResponses(Clock()), id_of()
    turn = plan_turn(request_of(before), stored)
    (attempt,) = turn.attempts
    assert turn.asks_owner and turn.known is None and not attempt.only_elsewhere
    attempt.request.check_last_turn(kept())
    for other in (None, kept(seed=1)):
        with pytest.raises(ApiError) as refusal:
            attempt.request.check_last_turn(other)
        assert refusal.value.code is Code.RESPONSE_NOT_FOUND
        assert (refusal.value.mapping.status, refusal.value.param) == (404, "previous_response_id")
    for changed in ({"instructions": "x"}, {"store": False}, {"reasoning": {"effort": "low"}}):
        (attempt,) = plan_turn(request_of(before, **changed), stored).attempts
        assert attempt.only_elsewhere


@pytest.mark.parametrize("name", ["resp_1", "chatcmpl-1", str(id_of(model="other"))])
def test_id_that_names_nothing_here_is_404(name: str) -> None:
    with pytest.raises(ApiError) as refusal:
        plan_turn(request_of(name), StoredResponses(Clock()))
    assert refusal.value.code is Code.RESPONSE_NOT_FOUND


def test_conversation_known_by_its_log_has_no_other_session() -> None:
    stored, before = StoredResponses(Clock()), id_of()
    stored.keep(response(before, None))
    assert appends(plan_turn(request_of(before), stored)) == [True]
    with pytest.raises(ApiError) as refusal:
        plan_turn(request_of(before, instructions="x"), stored)
    assert refusal.value.code is Code.RESPONSE_NOT_FOUND
    with pytest.raises(ApiError) as unlisted:
        list_items(response(before, None), read_page(None, "20", "asc"))
    assert unlisted.value.code is Code.NOT_FOUND


def test_input_items_are_listed_page_by_page() -> None:
    found = response(id_of(), [USER, ANSWER, {"role": "user", "content": "b"}])
    first = list_items(found, read_page(None, "2", "asc"))
    assert [item["role"] for item in first["data"]] == ["user", "assistant"]
    assert first["data"][0]["content"] == [{"type": "input_text", "text": "hi"}]
    assert first["has_more"]
    rest = list_items(found, read_page(first["last_id"], "2", "asc"))
    assert (len(rest["data"]), rest["has_more"]) == (1, False)
    newest = list_items(found, read_page(None, "1", "desc"))
    assert newest["data"][0]["content"][0]["text"] == "b"


@pytest.mark.parametrize(
    ("after", "limit", "order", "param"),
    [
        (None, "0", "asc", "limit"),
        (None, "101", "asc", "limit"),
        (None, "ten", "asc", "limit"),
        (None, "20", "up", "order"),
        ("msg_none", "20", "asc", "after"),
    ],
)
def test_wrong_page_is_refused_by_name(
    after: str | None, limit: str, order: str, param: str
) -> None:
    with pytest.raises(ApiError) as refusal:
        list_items(response(id_of()), read_page(after, limit, order))
    assert (refusal.value.code, refusal.value.param) == (Code.INVALID_REQUEST, param)
