"""Every field of transformers' GenerationConfig has an effect, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from modelswarm.client.hf.arguments import check_arguments, check_forward, unknown_fields
from modelswarm.client.hf.errors import UnsupportedArgumentError

MAKE: Any = GenerationConfig
IDS = torch.tensor([[5]])
FIELDS: dict[str, Any] = MAKE().to_dict() | vars(MAKE())
FIELDS.pop("_commit_hash", None)  # of transformers 5.17, whose to_dict leaves it out


def test_every_field_of_transformers_is_known() -> None:
    """A version with another field fails here: add it to the fields that are obeyed, or refused."""
    assert unknown_fields(FIELDS) == []


def test_field_of_a_later_version_is_refused_by_name() -> None:
    defaults = FIELDS | {"top_z": None}
    check_arguments({"top_z": None}, defaults, in_session=False)
    with pytest.raises(UnsupportedArgumentError, match=r"^top_z: this version does not know"):
        check_arguments({"top_z": 0.5}, defaults, in_session=False)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculation_type", "dflash"),
        ("decoder_start_token_id", 1),
        ("num_assistant_tokens", 5),
        ("num_assistant_tokens_schedule", "constant"),
        ("assistant_confidence_threshold", 0.5),
        ("assistant_lookbehind", 3),
        ("target_lookbehind", 3),
        ("use_cache", False),
    ],
)
def test_field_without_effect_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArgumentError, match=f"^{name}: "):
        check_arguments({name: value}, FIELDS, in_session=False)
    check_arguments({name: value}, FIELDS | {name: value}, in_session=False)


@pytest.mark.parametrize(
    ("name", "value", "plain"),
    [("num_beams", 4, 1), ("num_return_sequences", 2, 1), ("token_healing", True, False)],
)
def test_default_that_no_session_has_is_refused_by_name(name: str, value: Any, plain: Any) -> None:
    defaults = FIELDS | {name: value}
    check_arguments({}, defaults, in_session=False)
    check_arguments({name: plain}, defaults, in_session=True)
    with pytest.raises(UnsupportedArgumentError, match=f"^{name}: .*pass {name}={plain}"):
        check_arguments({}, defaults, in_session=True)


NEGATIVE = {"negative_prompt_ids": IDS}


@pytest.mark.parametrize(
    ("given", "other", "enough"),
    [
        (NEGATIVE, "guidance_scale", 1.5),
        (NEGATIVE | {"guidance_scale": 1.0}, "guidance_scale", 1.5),
        (
            {"negative_prompt_attention_mask": IDS, "guidance_scale": 1.5},
            "negative_prompt_ids",
            IDS,
        ),
        ({"assistant_ensemble_weight": 0.5}, "assistant_model", object()),
        ({"max_matching_ngram_size": 2}, "prompt_lookup_num_tokens", 3),
    ],
    ids=range(5),
)
def test_argument_without_the_one_it_belongs_to_is_refused(
    given: dict[str, Any], other: str, enough: Any
) -> None:
    """The other one may be the model's own."""
    name = next(iter(given))
    with pytest.raises(UnsupportedArgumentError, match=f"^{name}: .* only with {other}; give both"):
        check_arguments(given, FIELDS, in_session=False)
    check_arguments(given | {other: enough}, FIELDS, in_session=False)
    plain = {key: value for key, value in given.items() if key == name}
    check_arguments(plain, FIELDS | {other: enough}, in_session=False)
    check_arguments(plain, FIELDS | plain, in_session=False)


def test_tuple_as_the_result_of_forward_is_refused() -> None:
    check_forward({"return_dict": True, "output_attentions": False})
    with pytest.raises(UnsupportedArgumentError, match=r"^return_dict: results are never tuples"):
        check_forward({"return_dict": False})
