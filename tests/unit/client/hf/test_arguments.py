"""Every field of transformers' GenerationConfig has an effect, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from modelswarm.client.hf.arguments import check_arguments, unknown_fields
from modelswarm.client.hf.errors import UnsupportedArgumentError

MAKE: Any = GenerationConfig
FIELDS: dict[str, Any] = MAKE().to_dict() | vars(MAKE())


def test_every_field_of_transformers_is_known() -> None:
    """A version with another field fails here: add it to the fields that are obeyed, or refused."""
    assert unknown_fields(FIELDS) == []


def test_field_of_a_later_version_is_refused_by_name() -> None:
    defaults = FIELDS | {"top_z": None}
    check_arguments({"top_z": None}, defaults, in_session=False)
    with pytest.raises(UnsupportedArgumentError, match=r"^top_z: this version does not know"):
        check_arguments({"top_z": 0.5}, defaults, in_session=False)


@pytest.mark.parametrize(
    ("name", "value"), [("speculation_type", "dflash"), ("decoder_start_token_id", 1)]
)
def test_field_without_effect_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedArgumentError, match=f"^{name}: "):
        check_arguments({name: value}, FIELDS, in_session=False)
    check_arguments({name: value}, FIELDS | {name: value}, in_session=False)
