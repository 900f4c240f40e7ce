"""HTTP and gRPC accept the same values of the sampling fields, and refuse the others with the same messages."""

from __future__ import annotations

import math
from typing import Any

import pytest

from modelswarm.protocol.sampling import MAX_ALLOWED_TOKENS
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.requests import parse_generate_request
from modelswarm_gateway.api.http.openai_requests import parse_completion
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.generation.sampling_ranges import LIST_WORDS, RANGES

TINY = 1e-300
VALUES: dict[str, tuple[list[float], list[float]]] = {  # allowed, refused
    "temperature": ([0.0, TINY, 2.0], [-TINY, 2.001, math.nan, math.inf]),
    "top_p": ([TINY, 1.0], [0.0, 1.001, math.nan]),
    "top_k": ([-1, 0, 2**31 - 1], [-2]),
    "min_p": ([0.0, 1.0], [-TINY, 1.001, math.nan]),
    "repetition_penalty": ([TINY, 10.0], [0.0, 10.001]),
    "typical_p": ([TINY, 1.0], [0.0, 1.001, math.nan]),
    "presence_penalty": ([-2.0, 2.0], [-2.001, 2.001, math.nan]),
    "frequency_penalty": ([-2.0, 2.0], [-2.001, 2.001, math.inf]),
    "no_repeat_ngram_size": ([0, 3, 2**31 - 1], []),
    "min_tokens": ([0, 2**31 - 1], []),
    "seed": ([-(2**63), 2**63 - 1], []),
}

# Of HTTP; over gRPC the ids of a logit bias are numbers.
LISTS: dict[str, tuple[list[Any], list[Any]]] = {  # allowed, refused
    "logit_bias": ([{"0": 100, "9": -100.0}, {}], [{"1": 100.5}, {str(n): 1 for n in range(1025)}]),
    "bad_words": ([["x" * 200]], [["x" * 201], [""], ["x"] * 257]),
    "bad_words_ids": ([[[1] * 64], []], [[[]], [[1] * 65], [[1]] * 513]),
    "stop_token_ids": ([[], [0, 5]], [[1] * 1025]),
    "allowed_token_ids": ([[7]], [[1] * (MAX_ALLOWED_TOKENS + 1)]),
}


def refusal(name: str, value: Any) -> tuple[str | None, str | None]:
    """Return the messages of HTTP and gRPC for one value; None: accepted."""
    found: list[str | None] = []
    sent = {int(key): bias for key, bias in value.items()} if name == "logit_bias" else value
    sent = [api_pb2.TokenIds(ids=word) for word in value] if name == "bad_words_ids" else sent
    sampling: dict[str, Any] = {name: sent}
    for parse in (
        lambda: parse_completion({"model": "m", "prompt": "x", name: value}),
        lambda: parse_generate_request(
            api_pb2.GenerateRequest(model="m", prompt="x", sampling=api_pb2.Sampling(**sampling))
        ),
    ):
        try:
            parse()
        except ApiError as error:
            found.append(error.message)
        else:
            found.append(None)
    return found[0], found[1]


@pytest.mark.parametrize("name", VALUES)
def test_both_apis_have_the_same_sampling_ranges(name: str) -> None:
    allowed, refused = VALUES[name]
    for value in allowed:
        assert refusal(name, value) == (None, None), value
    for value in refused:
        for message in refusal(name, value):
            assert message is not None, value
            assert f"{name}: must be {RANGES[name].words}, not " in message


def test_every_sampling_field_has_a_range() -> None:
    fields = {field.name for field in api_pb2.Sampling.DESCRIPTOR.fields}
    assert set(VALUES) == set(RANGES) - {"max_tokens"}
    assert fields == set(VALUES) | set(LISTS) == set(VALUES) | set(LIST_WORDS)


@pytest.mark.parametrize("name", LISTS)
def test_both_apis_have_the_same_limits_of_lists(name: str) -> None:
    allowed, refused = LISTS[name]
    for value in allowed:
        assert refusal(name, value) == (None, None), value
    for value in refused:
        for message in refusal(name, value):
            assert message is not None, value
            assert f"{name}: must be {LIST_WORDS[name]}" in message
