"""Rows that an answer returns: where they begin is the client's word, and no position that a link cannot carry."""

from __future__ import annotations

from dataclasses import replace

import pytest

from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.rows.returned_rows import RowOptions
from modelswarm_gateway.generation.service import _add_rows
from modelswarm_gateway.models.sampling_defaults import SamplingOptions

TURN = TurnRequest((5, 6, 7), 4, Sampling())
SIZES = RowSizes(logit_bytes=8)
REQUEST = GenerationRequest("m", TokenPrompt(TURN.tokens), "prompt", SamplingOptions())
RESUMED = replace(REQUEST, session_id="s", resume_after=9, resume_mark="0123abcd")


def first_row(request: GenerationRequest, after: int | None) -> int:
    """Return the first row that the servers are asked for."""
    wanted = RowOptions(logits=True, hidden_states=False, after=after)
    turn, _ = _add_rows(TURN, replace(request, rows=wanted), SIZES, None)
    assert turn.sampling.returned is not None
    return turn.sampling.returned.start


def test_rows_begin_where_those_of_the_client_end() -> None:
    assert [first_row(REQUEST, after) for after in (None, 0, 3)] == [2, 0, 3]
    assert [first_row(RESUMED, after) for after in (None, 8, 10)] == [9, 8, 10]


@pytest.mark.parametrize("after", [4, 1 << 62, (1 << 64) - 1])
def test_rows_that_no_client_can_have_are_refused(after: int) -> None:
    """A server ends the link, with all sessions on it, for a number above 2^62."""
    for request, end in ((REQUEST, 3), (RESUMED, 10)):
        with pytest.raises(ApiError, match=rf"rows_after: \d+; allowed: 0 to {end}") as refused:
            first_row(request, max(after, end + 1))
        assert (refused.value.code, refused.value.param) == (Code.INVALID_REQUEST, "rows_after")
