"""`InferenceSession`: contexts on the servers that a program fills and steps by hand, by the logits of each step.

Each row of a batch is a session of the gateway, so a lost server or gateway costs a pause. Samples nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from copy import copy
from typing import Any, Self, SupportsIndex

import torch
from torch import Tensor

from modelswarm.client.engine.engine import Engine
from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.hf.inputs import Rows, check_ids, check_length, check_mask, split_rows
from modelswarm.client.hf.logits import read_logits
from modelswarm.client.hf.session import ModelSession
from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.errors import SessionLengthError
from modelswarm.client.tensors import side_by_side

_SHAPES = {
    "input_ids": "allowed: a list of integers, or a tensor [1, length]; several rows need prefill_batch",
    "token": "allowed: one integer",
    "tokens": "allowed: integers [batch] or [batch, 1], a token for each row",
}
_NO_VOCABULARY = 1 << 32  # token ids have 32 bits


class InferenceSession:
    """One context, or one for each row of a batch. Use it by `with`, or call `close`.

    All `max_length` positions of each row are reserved when it is opened. They are freed when the session is closed.
    Logits are float32 tensors on the CPU, of the position behind the last token.

    A call that fails changes nothing: it can be repeated. All methods raise SessionClosedError behind `close`,
    SessionBusyError in a second thread, SessionLengthError for more than `max_length`, and ArgumentError for wrong
    arguments, before anything is sent.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_length: int | None = None,
        batch_size: int = 1,
        ttl: int | None = None,
    ) -> None:
        """Open `batch_size` rows. More are opened by the first `prefill_batch` that has more.

        `max_length`: positions of a row, prompt and steps together; None: the model's whole context.
        `ttl`: seconds that a row is kept without a step.

        Raise NoCapacityError if the servers have no room.
        """
        if not isinstance(engine, Engine):
            raise ArgumentError(
                "engine", f"a {type(engine).__name__}; allowed: a modelswarm.Engine"
            )
        length = engine.max_length if max_length is None else max_length
        if length is None:
            raise ArgumentError("max_length", "the context is not known yet; give max_length")
        check_length(length, engine.max_length or 0)
        self._engine, self.max_length = engine, length
        self._vocabulary = engine.vocab_size or _NO_VOCABULARY
        self._logs: Rows = []
        self._session = ModelSession(
            lambda: engine.open_row(length, ttl), length, "transcript", nullcontext, batch_size
        )
        engine.adopt_session(self)

    @property
    def position(self) -> int:
        """Tokens of the context; of the longest one in a batch."""
        return max(map(len, self._logs), default=0)

    @property
    def tokens(self) -> Rows:
        """The token ids of each row, without padding."""
        return [list(log) for log in self._logs]

    def prefill(
        self,
        input_ids: Tensor | Sequence[int],
        *,
        truncate_to: int | None = None,
        all_positions: bool = False,
    ) -> Tensor:
        """Begin the context anew with these tokens, and return the logits [1, vocabulary] behind the last one.

        What the old context and the new one have in common is not computed again.

        `input_ids`: a tensor [1, length] of integers, or a list of ids.
        `truncate_to`: keep the last so many tokens.
        `all_positions`: return the logits [1, length, vocabulary] behind each token.
        """
        with self._session.turn():
            given = input_ids if isinstance(input_ids, Tensor) else _to_tensor(input_ids)
            ids = check_ids(given, self._vocabulary)
            if len(ids) != 1:
                detail = "allowed: [1, length]; for several rows use prefill_batch"
                raise ArgumentError("input_ids", f"the shape is {list(ids.shape)}; {detail}")
            logs = _truncate(split_rows(ids, None), truncate_to)
            return self._read_prompts(logs, all_positions=all_positions)

    def prefill_batch(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        truncate_to: int | None = None,
    ) -> Tensor:
        """Begin all rows anew, and return the logits [batch, vocabulary] behind the last token of each.

        `input_ids`: integers [batch, length], padded on the left.
        `attention_mask`: [batch, length], 0 for padding and 1 for tokens. Only a single row may be without one.
        `truncate_to`: keep the last so many tokens of each row; padding does not count.
        """
        with self._session.turn():
            ids = check_ids(input_ids, self._vocabulary)
            if attention_mask is not None:
                check_mask(attention_mask, ids)
            elif len(ids) > 1:
                detail = "give 0 for padding and 1 for tokens, torch.ones_like(input_ids) if no row is padded"
                raise ArgumentError("attention_mask", f"several rows need one; {detail}")
            return self._read_prompts(_truncate(split_rows(ids, attention_mask), truncate_to))

    def decode_step(self, token: SupportsIndex) -> Tensor:
        """Append one token, and return the logits [1, vocabulary] behind it."""
        with self._session.turn():
            if len(self._logs) > 1:
                detail = "for several rows use decode_step_batch"
                raise ArgumentError("token", f"the session has {len(self._logs)} rows; {detail}")
            return self._append("token", _to_tensor([token], "token"))

    def decode_step_batch(self, tokens: Tensor | Sequence[int]) -> Tensor:
        """Append one token to each row, and return the logits [batch, vocabulary] behind them.

        `tokens`: integers [batch] or [batch, 1], or a list of ids.
        """
        with self._session.turn():
            given = tokens if isinstance(tokens, Tensor) else _to_tensor(tokens, "tokens")
            return self._append("tokens", given)

    def fork(self) -> InferenceSession:
        """Open another session with the context of every row, whose KV the servers copy; use it by `with`, too.

        Both go on independently, and closing one leaves the other. The fork has this session's `max_length` and ttl.

        Raise NoCapacityError if the servers have no room for all rows. This session stays as it is.
        """
        made = copy(self)
        made._session = self._session.fork()
        made._logs = [list(log) for log in self._logs]
        self._engine.adopt_session(made)
        return made

    def close(self) -> None:
        """Free the room of all rows. A second call does nothing."""
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- inside

    def _append(self, name: str, tokens: Tensor) -> Tensor:
        if not self._logs:
            raise ArgumentError(name, "the session is empty; begin with prefill")
        wanted = len(self._logs)
        if tokens.numel() != wanted or tokens.shape[0] != wanted:
            detail = f"allowed: [{wanted}] or [{wanted}, 1], a token for each row"
            raise ArgumentError(name, f"the shape is {list(tokens.shape)}; {detail}")
        new = check_ids(tokens.reshape(-1, 1), self._vocabulary, name).flatten().tolist()
        return self._read([[*log, token] for log, token in zip(self._logs, new, strict=True)])

    def _read_prompts(self, logs: Rows, *, all_positions: bool = False) -> Tensor:
        self._check_length(logs)
        return self._read(self._session.contexts(logs), all_positions=all_positions)

    def _read(self, logs: Rows, *, all_positions: bool = False) -> Tensor:
        """Bring each row to its log, and return the logits behind it. The rows are asked for side by side."""
        self._check_length(logs)
        rows = self._session.rows
        counts = [len(log) if all_positions else 1 for log in logs]
        found = side_by_side(read_logits, rows, logs, counts)
        self._logs = logs
        return torch.stack(found) if all_positions else torch.cat(found)

    def _check_length(self, logs: Rows) -> None:
        longest = max(map(len, logs))
        if longest > self.max_length:
            detail = f"{longest} tokens, and it is {self.max_length}"
            raise SessionLengthError("max_length", f"maximum length exceeded: {detail}")


def _truncate(rows: Rows, length: int | None) -> Rows:
    """Return the last `length` tokens of each row."""
    if length is None:
        return rows
    if not is_integer(length) or length < 1:
        raise ArgumentError("truncate_to", f"{length!r}; allowed: an integer of at least 1")
    return [row[-length:] for row in rows]


def _to_tensor(ids: Sequence[Any], name: str = "input_ids") -> Tensor:
    """Return ids [1, length], or those of a step [batch, 1]. Raise ArgumentError for other values than integers."""
    try:
        numbers = [operator.index(each) for each in ids]
        found = torch.tensor(numbers, dtype=torch.int64)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        given = ids[0] if name == "token" else ids
        shown = f"a {type(given).__name__} without token ids"
        if isinstance(given, (list, tuple)) and any(
            isinstance(each, (list, tuple)) for each in given
        ):
            shown = f"the shape is [{len(given)}, ...]"
        raise ArgumentError(name, f"{shown}; {_SHAPES[name]}") from None
    return found[None] if name == "input_ids" else found[:, None]
