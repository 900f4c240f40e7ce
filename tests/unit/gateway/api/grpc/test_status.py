"""The status of an ApiError as google.rpc's messages."""

from __future__ import annotations

import pytest
from google.rpc import error_details_pb2

from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.field_names import move_field, rename_field
from modelswarm_gateway.api.grpc.status import MAX_SENTENCE_BYTES, build_status
from modelswarm_gateway.errors import TABLE, ApiError, Code

STEP = api_pb2.SessionStep.DESCRIPTOR


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_reason_and_a_retry_if_it_may_help(code: Code) -> None:
    status = build_status(ApiError(code, "so it is"))
    assert (status.code, status.message) == (TABLE[code].grpc.value[0], "so it is")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.reason, info.metadata["code"]) == (code.value.upper(), code.value)
    found = [packed for packed in status.details if packed.Unpack(retry)]
    assert bool(found) == TABLE[code].retryable
    if found:
        assert retry.retry_delay.ToMilliseconds() > 0


def test_retry_delay_is_that_of_the_error() -> None:
    status = build_status(ApiError(Code.NO_CAPACITY, "full", retry_after=2.5))
    retry = error_details_pb2.RetryInfo()
    assert any(packed.Unpack(retry) for packed in status.details)
    assert retry.retry_delay.ToMilliseconds() == 2500


@pytest.mark.parametrize("letter", ["x", "é", "日"])
def test_long_sentence_is_cut_to_what_clients_take(letter: str) -> None:
    status = build_status(ApiError(Code.INVALID_REQUEST, letter * 5000, param="prompt"))
    assert status.message == letter * (MAX_SENTENCE_BYTES // len(letter.encode())) + "…"
    assert len(status.SerializeToString()) < 3 * MAX_SENTENCE_BYTES


@pytest.mark.parametrize(
    ("param", "message", "place", "sentence"),
    [
        ("top_p", "top_p: must be 1", "sampling.top_p", "sampling.top_p: must be 1"),
        ("logit_bias.5", "logit_bias: no", "sampling.logit_bias.5", "sampling.logit_bias: no"),
        (
            "messages[0].role",
            "messages[0].role: x",
            "chat.messages[0].role",
            "chat.messages[0].role: x",
        ),
        ("Last-Event-ID", "Last-Event-ID: 3 is old", "resume_after", "resume_after: 3 is old"),
        ("prompt", "too long", "prompt", "too long"),
    ],
)
def test_error_names_the_field_of_api_proto(
    param: str, message: str, place: str, sentence: str
) -> None:
    renamed = rename_field(ApiError(Code.INVALID_REQUEST, message, param=param, retry_after=2.0))
    assert (renamed.param, renamed.message, renamed.retry_after) == (place, sentence, 2.0)
    assert rename_field(renamed).param == place, "a forwarded error has its name already"


def test_error_without_a_field_stays_as_it_is() -> None:
    error = ApiError(Code.INTERNAL, "internal error")
    assert rename_field(error) is error
    assert move_field(error, "step", STEP) is error
    other = ApiError(Code.SESSION_BUSY, "session_id: busy", param="session_id")
    assert move_field(other, "step", STEP) is other, "a field of another message"


def test_field_of_an_inner_message_is_moved() -> None:
    moved = move_field(ApiError(Code.INVALID_REQUEST, "stop: no", param="stop"), "step", STEP)
    assert (moved.param, moved.message) == ("step.stop", "step.stop: no")
