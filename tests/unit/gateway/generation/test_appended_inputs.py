"""The whole input of a turn with `append`: the log, and what is new."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelswarm.protocol.messages import Sampling, Turn
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.continuation import append_to_log

END = 9
KEPT = ParkedTurn((5, 6, END), Turn(2, 3, sampling=Sampling(eos=(END,))))


@pytest.mark.parametrize(
    ("is_chat", "whole"), [(True, (5, 6, END, 7)), (False, (5, 6, END, END, 7))]
)
def test_only_a_template_writes_the_last_end_token_again(
    is_chat: bool, whole: tuple[int, ...]
) -> None:
    assert append_to_log(KEPT, (END, 7), None, "", is_chat=is_chat) == whole


def test_other_tokens_are_appended_as_they_are() -> None:
    for is_chat in (True, False):
        assert append_to_log(KEPT, (7, END), None, "", is_chat=is_chat) == (5, 6, END, 7, END)
        assert append_to_log(KEPT, (END, 7), 2, "", is_chat=is_chat) == (5, 6, END, 7)


def test_log_of_another_tokenizer_is_not_continued() -> None:
    kept = replace(KEPT, tokenizer="old")
    assert append_to_log(kept, (7,), None, "old", is_chat=False) == (5, 6, END, 7)
    with pytest.raises(ApiError, match="the tokenizer of this model was replaced") as refused:
        append_to_log(kept, (7,), None, "new", is_chat=False)
    assert refused.value.code is Code.SESSION_EXPIRED
