"""Rows of hidden states as input (R14, opaque rows): checks of what a client sends, and their log entries.

The gateway keeps the rows with the session's log, so that lost servers lose none. Used by the service and the gRPC API.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from modelswarm.protocol.opaque import OPAQUE, chain_bytes, is_opaque
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.turn import ParkedTurn, TurnRequest
from modelswarm_gateway.errors import ApiError, Code, invalid_field
from modelswarm_gateway.generation.request import GenerationRequest, RowsPrompt

# Bytes of the rows that one session may have in its log.
MAX_SESSION_BYTES = 64 << 20
# Bytes of the rows of all sessions of this gateway.
MAX_GATEWAY_BYTES = 512 << 20
# Bytes of one position's row with those of all blocks: they are one log entry, and travel in one message.
MAX_CHAIN_BYTES = 3 << 20
# Bits of the exponent: all are set in infinities and NaNs.
_EXPONENTS = {
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}


def check_input_rows(
    request: GenerationRequest, card: ModelCard, sizes: RowSizes, kept_bytes: Callable[[], int]
) -> None:
    """Raise ApiError unless the model's servers take the rows of the request, if it has some.

    `kept_bytes` returns those of all rows that this gateway keeps.
    """
    prompt, field = request.prompt, request.prompt_field
    if not isinstance(prompt, RowsPrompt):
        return
    width = sizes.hidden_bytes // sizes.number_bytes
    if not width:
        detail = "no server that takes rows of this model is linked; retry in 1 s"
        raise ApiError(Code.NO_SERVERS, detail, param=field, retry_after=1.0)
    has_block_rows = prompt.has_block_rows and request.blocks is None
    each = _chain_shape(field, width, card, sizes) if has_block_rows else (width,)
    _check_tensor(field, prompt, each, sizes)
    kept = kept_bytes()
    if kept + len(prompt.data) > MAX_GATEWAY_BYTES:
        detail = f"this gateway keeps {kept >> 20} MiB of rows; close sessions, or retry later"
        raise ApiError(Code.NO_CAPACITY, f"{field}: {detail}", param=field, retry_after=10.0)


def _chain_shape(field: str, width: int, card: ModelCard, sizes: RowSizes) -> tuple[int, int]:
    """Return the shape of a row with those of all blocks. Raise ApiError if no message holds it, or a server is old."""
    if not card.takes_block_rows:
        detail = "for rows of blocks all servers of this model must be linked by version 2.4 or newer; retry in 1 s"
        raise ApiError(Code.NO_SERVERS, f"{field}: {detail}", param=field, retry_after=1.0)
    size = chain_bytes(sizes.hidden_bytes, card.n_blocks)
    if size > MAX_CHAIN_BYTES:
        detail = f"{size} bytes for one position, with rows of all blocks; a message holds {MAX_CHAIN_BYTES}"
        raise invalid_field(field, detail)
    return (1 + card.n_blocks, width)


def _check_tensor(field: str, given: RowsPrompt, each: tuple[int, ...], sizes: RowSizes) -> None:
    """Raise ApiError unless these are rows of this form, at least one, of finite numbers."""
    if given.dtype != sizes.dtype:
        detail = f"dtype is {given.dtype!r}; the servers of this model compute in {sizes.dtype!r}"
        raise invalid_field(field, detail)
    count = given.shape[0] if given.shape else 0
    if given.shape != (count, *each) or not count:
        form = ", ".join(map(str, ("rows", *each)))
        detail = f"shape is {list(given.shape)}; it must be [{form}], with at least one row"
        raise invalid_field(field, detail)
    size = count * math.prod(each) * sizes.number_bytes
    if len(given.data) != size:
        detail = f"data has {len(given.data)} bytes; {size} make this shape"
        raise invalid_field(field, detail)
    if given.dtype in _EXPONENTS:
        kind, exponent = _EXPONENTS[given.dtype]
        if bool(np.any((np.frombuffer(given.data, kind) & exponent) == exponent)):
            raise invalid_field(field, "a number is infinite or NaN; all must be finite")


def add_opaque(
    turn: TurnRequest,
    request: GenerationRequest,
    row_bytes: int,
    start: int,
    kept: ParkedTurn | None,
) -> TurnRequest:
    """Return the turn with the rows of its input, which begins at position `start`. Raise ApiError.

    `kept`: what the session had before.
    """
    before = 0 if kept is None else min(start, kept.turn.prompt_rows)
    prompt = request.prompt
    if not isinstance(prompt, RowsPrompt):
        _check_log(turn.tokens, request, row_bytes, 0)
        return turn
    rows = dict(enumerate(prompt.entry_rows(), start))
    if prompt.has_block_rows and before < start:
        detail = f"rows of blocks begin a session, and this input is after {start} entries"
        raise invalid_field(request.prompt_field, detail)
    if before and not prompt.has_block_rows:
        detail = "the session begins with rows of blocks; send tokens after them"
        raise invalid_field(request.prompt_field, detail)
    more = (before + len(rows)) * (len(rows[start]) - row_bytes)
    _check_log(turn.tokens, request, row_bytes, more)
    return replace(turn, opaque=rows)


def _check_log(
    entries: Sequence[int], request: GenerationRequest, row_bytes: int, more_bytes: int
) -> None:
    """Raise ApiError if the log of a turn has too many rows, or the request asks for its text.

    `more_bytes`: of the rows that are for single blocks.
    """
    if max(entries) < OPAQUE:
        return
    count = sum(map(is_opaque, entries))
    if (size := count * row_bytes + more_bytes) > MAX_SESSION_BYTES:
        field, most = request.prompt_field, MAX_SESSION_BYTES // (size // count)
        detail = f"the session would have {count} rows that are no tokens; at most {most} are kept"
        raise invalid_field(field, detail)
    for name, is_wanted in (
        ("echo", request.echo),
        ("prompt_logprobs", request.options.prompt_logprobs is not None),
    ):
        if count and is_wanted:
            detail = "the session has rows that are no tokens, and have neither; leave it out"
            raise invalid_field(name, detail)
