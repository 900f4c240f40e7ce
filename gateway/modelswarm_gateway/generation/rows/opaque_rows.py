"""Rows of hidden states as input (R14, opaque rows): checks of what a client sends, and their log entries.

The gateway keeps the rows with the session's log, so that lost servers lose none. Used by the service and the gRPC API.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from modelswarm.protocol.opaque import OPAQUE, is_opaque
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code, invalid_field, invalid_request
from modelswarm_gateway.generation.request import GenerationRequest, RowsPrompt

# Bytes of the rows that one session may have in its log.
MAX_SESSION_BYTES = 64 << 20
# Bytes of the rows of all sessions of this gateway.
MAX_GATEWAY_BYTES = 512 << 20
# Bits of the exponent: all are set in infinities and NaNs.
_EXPONENTS = {
    "float32": (np.uint32, 0x7F80_0000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}


def check_input_rows(
    request: GenerationRequest, sizes: RowSizes, kept_bytes: Callable[[], int]
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
    if prompt.dtype != sizes.dtype:
        detail = f"dtype is {prompt.dtype!r}; the servers of this model compute in {sizes.dtype!r}"
        raise invalid_field(field, detail)
    count = prompt.shape[0] if prompt.shape else 0
    if prompt.shape != (count, width) or not count:
        detail = f"shape is {list(prompt.shape)}; it must be [rows, {width}], with at least one row"
        raise invalid_field(field, detail)
    if len(prompt.data) != count * sizes.hidden_bytes:
        detail = f"data has {len(prompt.data)} bytes; {count * sizes.hidden_bytes} make this shape"
        raise invalid_field(field, detail)
    if prompt.dtype in _EXPONENTS:
        kind, exponent = _EXPONENTS[prompt.dtype]
        if bool(np.any((np.frombuffer(prompt.data, kind) & exponent) == exponent)):
            raise invalid_request(
                field, f"{field}: a number is infinite or NaN; all must be finite"
            )
    kept = kept_bytes()
    if kept + len(prompt.data) > MAX_GATEWAY_BYTES:
        detail = f"this gateway keeps {kept >> 20} MiB of rows; close sessions, or retry later"
        raise ApiError(Code.NO_CAPACITY, f"{field}: {detail}", param=field, retry_after=10.0)


def add_opaque(
    turn: TurnRequest, request: GenerationRequest, row_bytes: int, start: int
) -> TurnRequest:
    """Return the turn with the rows of its input, which begins at position `start`. Raise ApiError."""
    _check_log(turn.tokens, request, row_bytes)
    if not isinstance(request.prompt, RowsPrompt):
        return turn
    data = request.prompt.data
    places = enumerate(range(start, len(turn.tokens)))
    rows = {at: data[i * row_bytes : (i + 1) * row_bytes] for i, at in places}
    return replace(turn, opaque=rows)


def _check_log(entries: Sequence[int], request: GenerationRequest, row_bytes: int) -> None:
    """Raise ApiError if the log of a turn has too many rows, or the request wants to have its text."""
    if max(entries) < OPAQUE:
        return
    count = sum(map(is_opaque, entries))
    if count * row_bytes > MAX_SESSION_BYTES:
        field, most = request.prompt_field, MAX_SESSION_BYTES // row_bytes
        detail = f"the session would have {count} rows that are no tokens; at most {most} are kept"
        raise invalid_field(field, detail)
    for name, is_wanted in (
        ("echo", request.echo),
        ("prompt_logprobs", request.options.prompt_logprobs is not None),
    ):
        if count and is_wanted:
            detail = "the session has rows that are no tokens, and have neither; leave it out"
            raise invalid_field(name, detail)
