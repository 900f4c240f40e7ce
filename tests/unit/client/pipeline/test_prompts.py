"""The forms of prompts, their configs, and their order."""

from __future__ import annotations

from typing import Any

import pytest

from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.prompts import Prompt, configs_of, longest_first, parse_prompts
from modelswarm.errors import UserError

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("given", "items", "is_single"),
    [
        ("Hi", [Prompt(text="Hi")], True),
        (["Hi", ""], [Prompt(text="Hi"), Prompt(text="")], False),
        (HI, [Prompt(messages=(HI[0],))], True),
        ([HI, "Ho"], [Prompt(messages=(HI[0],)), Prompt(text="Ho")], False),
        ([3, 4], [Prompt(token_ids=(3, 4))], True),
        ([[3], [4]], [Prompt(token_ids=(3,)), Prompt(token_ids=(4,))], False),
        ([], [], False),
    ],
)
def test_forms_of_prompts_are_told_apart(given: Any, items: list[Prompt], is_single: bool) -> None:
    found = parse_prompts(given)

    assert list(found.items) == items
    assert found.is_single == is_single


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (5, "prompts"),
        (("Hi", "image.png"), "prompts"),
        (["Hi", ("Ho", "image.png")], "prompts[1]"),
        (["Hi", None], "prompts[1]"),
        (["Hi", []], "prompts[1]"),
        ([[3, 1.5]], "prompts[0]"),
        ([{"content": "Hi"}], "prompts[0]"),
        ([HI, [{"role": "user"}]], "prompts[1][0]"),
    ],
)
def test_other_forms_are_refused_with_their_place(given: Any, field: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_prompts(given)

    assert caught.value.field == field


def test_configs_are_one_for_all_or_one_for_each() -> None:
    short = GenerationConfig(max_new_tokens=1)

    assert configs_of(short, 2) == (short, short)
    assert configs_of([short, None], 2) == (short, GenerationConfig())
    with pytest.raises(UserError, match="1 configs for 2 prompts"):
        configs_of([short], 2)


def test_longest_work_comes_first() -> None:
    prompts = [Prompt(text="a" * 400), Prompt(text="a"), Prompt(token_ids=(1,) * 4000), Prompt()]
    configs = [GenerationConfig(max_new_tokens=count) for count in (10, 300, 10, None)]

    assert longest_first(prompts, configs) == [3, 2, 1, 0]
