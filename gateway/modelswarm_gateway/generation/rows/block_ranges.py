"""Sessions of a range of blocks: what a client may ask for, and the sizes of their rows. Used by the service."""

from __future__ import annotations

from modelswarm.protocol.messages import BlockRange
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.errors import ApiError, Code, invalid_field, invalid_request
from modelswarm_gateway.generation.request import GenerationRequest, RowsPrompt


def row_sizes(request: GenerationRequest, card: ModelCard) -> RowSizes:
    """Return the sizes of the rows that the request sends and gets. Raise ApiError for a range that cannot be run."""
    if request.blocks is None:
        return card.rows
    _check_blocks(request.blocks, card)
    if request.reservation is None:
        _check_step(request)
    return card.boundary_rows


def placeholder(card: ModelCard) -> RowsPrompt:
    """Return the one entry of a session of blocks that was opened and has had no turn. Raise ApiError."""
    sizes = card.boundary_rows
    width = max(1, sizes.hidden_bytes // sizes.number_bytes)
    return RowsPrompt(sizes.dtype, (1, width), bytes(width * sizes.number_bytes))


def check_same_blocks(request: GenerationRequest, kept: ParkedTurn | None) -> None:
    """Raise ApiError if the session of the request was opened with other blocks than the request names."""
    if kept is None or request.reservation is not None or kept.turn.blocks == request.blocks:
        return
    has = "all blocks, on tokens" if kept.turn.blocks is None else _show(kept.turn.blocks)
    wanted = "names none" if request.blocks is None else f"names {_show(request.blocks)}"
    detail = f"the session is of {has}, and the request {wanted}"
    raise invalid_field("blocks", f"{detail}; a session keeps those of its open")


def _check_blocks(blocks: BlockRange, card: ModelCard) -> None:
    if not card.boundary_rows.hidden_bytes:
        detail = "all servers of this model must be linked by version 2.2 or newer; retry in 1 s"
        raise ApiError(Code.NO_SERVERS, f"blocks: {detail}", param="blocks", retry_after=1.0)
    if not 0 <= blocks.first < blocks.last <= card.n_blocks:
        detail = f"allowed: 0 <= first < last <= {card.n_blocks}, the blocks of {card.name!r}"
        raise invalid_field("blocks", f"{_show(blocks)}; {detail}")


def _check_step(request: GenerationRequest) -> None:
    """Refuse what has no effect on rows."""
    field = request.prompt_field
    if not isinstance(request.prompt, RowsPrompt):
        raise invalid_request(field, f"{field}: a session of blocks takes rows; send hidden_states")
    if request.options.max_tokens != 0:
        detail = "a session of blocks generates nothing; send 0"
        raise invalid_field("max_tokens", detail)
    rows = request.rows
    if rows is None or not rows.hidden_states:
        detail = "a session of blocks returns nothing else; set it"
        raise invalid_field("return_hidden_states", detail)
    if rows.logits:
        detail = "a session of blocks has no logits; leave it out"
        raise invalid_field("return_logits", detail)


def _show(blocks: BlockRange) -> str:
    return f"blocks {blocks.first}:{blocks.last}"
