"""`GenerationConfig`: each field has an effect on the request, or is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from modelswarm.client.api.fields import COMPLETION_FIELDS
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.errors import UserError

SEED = 11
# A value of each field that is obeyed, what it needs beside it, and the request's field that it changes.
EFFECTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "max_new_tokens": (3, {}, "max_tokens"),
    "do_sample": (True, {}, "temperature"),
    "top_p": (0.5, {"do_sample": True}, "top_p"),
    "top_k": (3, {"do_sample": True}, "top_k"),
    "min_p": (0.1, {"do_sample": True}, "min_p"),
    "temperature": (0.1, {"do_sample": True}, "temperature"),
    "repetition_penalty": (1.5, {}, "repetition_penalty"),
    "ignore_eos": (True, {}, "ignore_eos"),
    "random_seed": (0, {"do_sample": True}, "seed"),
    "stop_words": ("end", {}, "stop"),
    "bad_words": (["bad", "worse"], {}, "bad_words"),
    "stop_token_ids": ([3], {}, "stop_token_ids"),
    "bad_token_ids": ([4], {}, "logit_bias"),
    "min_new_tokens": (2, {}, "min_tokens"),
    "skip_special_tokens": (False, {}, "skip_special_tokens"),
    "logprobs": (2, {}, "logprobs"),
    "response_format": ({"type": "json_object"}, {}, "response_format"),
    "include_stop_str_in_output": (True, {}, "include_stop_str_in_output"),
}
ROWS = {"output_logits", "output_last_hidden_state"}  # that a forward pass reads
REFUSED: dict[str, Any] = {
    "n": 2,
    "spaces_between_special_tokens": False,
    "logits_processors": [lambda ids, logits: logits],
    "return_ppl": True,
    "return_routed_experts": True,
    "with_cache": True,
    "preserve_cache": True,
    "migration_request": object(),
    "repetition_ngram_size": 3,
    "repetition_ngram_threshold": 3,
}
WRONG: dict[str, list[Any]] = {
    "max_new_tokens": [0, -1, 1.5, True, "8"],
    "top_p": [0, 1.1, "1"],
    "top_k": [-1, 2.0],
    "min_p": [-0.1, 1.1],
    "temperature": [-0.1, 2.1],
    "repetition_penalty": [0, 10.5],
    "random_seed": [2**64, 1.0],
    "stop_words": ["", ["a"] * 17, ["a" * 1001], 5, [5]],
    "bad_words": [[""], ["a"] * 257, ["a" * 201]],
    "stop_token_ids": [[-1], ["a"], 5, [1] * 1025],
    "bad_token_ids": [[-1], "12", [True]],
    "min_new_tokens": [-1, 513],
    "logprobs": [0, 21, True],
    "output_logits": ["some", True, 5, ["all"]],
    "output_last_hidden_state": ["last"],
    "do_sample": [1, None],
    "response_format": [
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "regex_schema"},
        {"type": "regex_schema", "regex_schema": 5},
        {"type": "json_schema", "json_schema": "x"},
        "x",
    ],
}


def test_every_field_is_obeyed_or_refused() -> None:
    assert {field.name for field in fields(GenerationConfig)} == set(EFFECTS) | set(REFUSED) | ROWS


@pytest.mark.parametrize("name", EFFECTS)
def test_obeyed_field_changes_the_request(name: str) -> None:
    value, beside, changed = EFFECTS[name]
    plain = GenerationConfig(**beside)

    before = plain.request_fields(9, SEED)
    after = replace(plain, **{name: value}).request_fields(9, SEED)

    assert before.get(changed) != after[changed]
    assert set(before) | set(after) <= COMPLETION_FIELDS


@pytest.mark.parametrize("name", REFUSED)
def test_refused_field_is_named(name: str) -> None:
    with pytest.raises(UserError, match="allowed") as caught:
        GenerationConfig(**{name: REFUSED[name]})

    assert caught.value.field == name


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_value_out_of_range_is_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        GenerationConfig(**{"do_sample": True, name: value})

    assert caught.value.field == name


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p", "temperature"])
def test_greedy_config_refuses_values_of_sampling(name: str) -> None:
    values: dict[str, Any] = {name: 0.5 if name != "top_k" else 5}

    with pytest.raises(UserError, match="set do_sample=True") as caught:
        GenerationConfig(**values)

    assert caught.value.field == name


def test_shortest_answer_may_be_the_longest() -> None:
    assert GenerationConfig(min_new_tokens=2, max_new_tokens=2).min_new_tokens == 2
    assert GenerationConfig(min_new_tokens=2, max_new_tokens=None).min_new_tokens == 2
    with pytest.raises(UserError, match=r"^min_new_tokens: 9 is above max_new_tokens"):
        GenerationConfig(min_new_tokens=9, max_new_tokens=2)


def test_greedy_config_takes_a_seed_and_needs_none() -> None:
    assert "seed" not in GenerationConfig(random_seed=-1).request_fields(9, SEED)


def test_greedy_config_sends_no_sampling() -> None:
    found = GenerationConfig(temperature=0, top_k=1).request_fields(9, SEED)

    assert found["temperature"] == 0.0
    assert not {"seed", "top_k", "top_p"} & set(found)


def test_answer_without_limit_takes_the_room() -> None:
    assert GenerationConfig(max_new_tokens=None).request_fields(9, SEED)["max_tokens"] == 9


def test_regular_expression_becomes_a_structured_output() -> None:
    config = GenerationConfig(response_format={"type": "regex_schema", "regex_schema": "a+"})

    assert config.request_fields(9, SEED)["structured_outputs"] == {"regex": "a+"}


def test_structured_answer_refuses_to_ignore_its_end() -> None:
    with pytest.raises(UserError, match="ends by itself"):
        GenerationConfig(response_format={"type": "json_object"}, ignore_eos=True)


def test_integers_of_numpy_are_those_of_python_in_a_request() -> None:
    given: dict[str, Any] = {"max_new_tokens": 5, "top_k": 3, "random_seed": 7, "logprobs": 2}
    plain = GenerationConfig(do_sample=True, **given)
    other: dict[str, Any] = {name: np.int64(value) for name, value in given.items()}
    sent = GenerationConfig(do_sample=True, **other).request_fields(9, SEED)
    assert json.loads(json.dumps(sent)) == plain.request_fields(9, SEED)
