"""Bounds of the rows that a client sends in place of tokens, and of those that blocks add."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from typing_extensions import override

from modelswarm.protocol.messages import Sampling, Turn
from modelswarm.protocol.opaque import OPAQUE
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.turn import ParkedTurn, TurnRequest
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.request import GenerationRequest, RowsPrompt
from modelswarm_gateway.generation.rows.opaque_rows import (
    MAX_GATEWAY_BYTES,
    add_opaque,
    check_input_rows,
)
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from tools.dashboard.metric_registries import make_node

WIDTH, BLOCKS = 2048, 300
SIZES = RowSizes(0, 2 * WIDTH, "bfloat16")
CARD = ModelCard("m", "r", BLOCKS, (), 100, None, 0, takes_block_rows=True)


def request(count: int, blocks: int = BLOCKS) -> GenerationRequest:
    shape = (count, 1 + blocks, WIDTH)
    rows = RowsPrompt("bfloat16", shape, bytes(2 * count * (1 + blocks) * WIDTH))
    return GenerationRequest("m", rows, "hidden_states", SamplingOptions())


def refusal(card: ModelCard, given: GenerationRequest, kept: int = 0) -> ApiError:
    with pytest.raises(ApiError) as refused:
        check_input_rows(given, card, SIZES, lambda: kept)
    return refused.value


def test_prompts_need_servers_that_know_them() -> None:
    check_input_rows(request(1), CARD, SIZES, lambda: 0)
    error = refusal(replace(CARD, takes_block_rows=False), request(1))
    assert (error.code, error.param) == (Code.NO_SERVERS, "hidden_states")
    assert "2.4" in error.message


def test_a_position_that_fits_in_no_message_is_refused() -> None:
    error = refusal(replace(CARD, n_blocks=768), request(1, 768))
    assert error.message == (
        "hidden_states: 3149824 bytes for one position, with rows of all blocks; "
        "a message holds 3145728"
    )


def test_prompts_count_for_the_bound_of_the_gateway() -> None:
    size = 301 * 4096
    check_input_rows(request(1), CARD, SIZES, lambda: MAX_GATEWAY_BYTES - size)
    error = refusal(CARD, request(1), MAX_GATEWAY_BYTES - size + 1)
    assert (error.code, error.param) == (Code.NO_CAPACITY, "hidden_states")


def test_numbers_that_are_not_finite_are_refused() -> None:
    given: Any = request(1)
    damaged = replace(given.prompt, data=b"\xff" * len(given.prompt.data))
    error = refusal(CARD, replace(given, prompt=damaged))
    assert error.message == "hidden_states: a number is infinite or NaN; all must be finite"


def test_prompts_count_for_the_bound_of_a_session() -> None:
    """Those of earlier steps, too: 54 positions of 301 rows of 4 KiB are 63 MiB."""
    given, before = request(1), 53
    kept = ParkedTurn((OPAQUE,) * before, Turn(9, 10, prompt_rows=before))
    turn = TurnRequest((OPAQUE,) * (before + 1), 0, Sampling())
    made = add_opaque(turn, given, SIZES.hidden_bytes, before, kept)
    assert {at: len(row) for at, row in made.opaque.items()} == {before: 301 * 4096}
    kept = replace(kept, turn=Turn(9, 10, prompt_rows=54))
    turn = replace(turn, tokens=(OPAQUE,) * 55)
    with pytest.raises(ApiError, match="would have 55 rows that are no tokens; at most 54"):
        add_opaque(turn, given, SIZES.hidden_bytes, 54, kept)


class Walked(dict[int, bytes]):
    """Rows of a log; counts those that are looked at."""

    looks = 0

    @override
    def values(self) -> Any:
        for row in super().values():
            self.looks += 1
            yield row


async def test_rows_of_the_gateway_are_counted_without_a_walk() -> None:
    """Each step of a session of blocks asks for this sum, which bounds its own input."""
    node = make_node()
    for session in (node.open_session("m"), node.open_session("m")):
        node._core._sessions[session].opaque = Walked({at: bytes(8) for at in range(100)})
    node.open_session("m")
    assert node.opaque_bytes() == 2 * 100 * 8
    assert [s.opaque.looks for s in node._core._sessions.values() if s.opaque] == [1, 1]  # type: ignore[attr-defined]
