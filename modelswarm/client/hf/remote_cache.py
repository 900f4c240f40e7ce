"""The KV of a batch as transformers' loops see it: a Cache whose rows are sessions on the servers.

Beams, assistants and processors of the caller run by transformers' own code on logits. Each row has a log of tokens.
Reordering or cropping rows changes logs only. The next forward finds for each log the session that has most of it,
rewinds it, and sends the rest. A log without a session of its own gets a fork of the one that has most of it, whose KV
the servers copy. Rows with equal logs are computed once. Knows no processors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.hf.logits import read_logits
from modelswarm.client.sessions.errors import NoCapacityError, SessionClosedError
from modelswarm.client.sessions.session import GatewaySession
from modelswarm.client.tensors import side_by_side
from modelswarm.protocol.beam_forks import Source, choose_sources

_hf: Any = import_module("transformers")
_RESULT = _hf.modeling_outputs.CausalLMOutputWithPast
CACHE_NAME = "cache" if hasattr(_RESULT, "cache") else "past_key_values"
"""Name of the cache in transformers' loops and results: another one since 5.24."""


class RemoteCache(_hf.Cache):  # type: ignore[misc]
    """Rows of a batch. Sessions are opened as they are needed, unless `fixed` has one for each row."""

    def __init__(
        self,
        open_session: Callable[[], GatewaySession],
        vocabulary: int,
        fixed: Sequence[GatewaySession] | None = None,
    ) -> None:
        super().__init__(layers=[])
        self._open_session, self._vocabulary = open_session, vocabulary
        self._fixed = fixed
        self._sessions: list[GatewaySession] = list(fixed or ())
        self._logs: list[list[int]] = []
        self._length = 0  # positions of the batch, padding included
        self._is_closed = False
        self.is_used = False  # logits were asked for

    # ---- as transformers' loops use it

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return True

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._length

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last -`tokens_to_remove` positions; 0: none."""
        count = -tokens_to_remove
        if not 0 <= count <= self._length:
            raise ValueError(f"crop({tokens_to_remove}): allowed: 0 to -{self._length}")
        self._length -= count
        self._logs = [log[: len(log) - count] for log in self._logs]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._logs = [list(self._logs[place]) for place in beam_idx.tolist()]

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._logs = [list(log) for log in self._logs for _ in range(repeats)]

    def activate_past_recording(self) -> None:
        """Record nothing: logs can always be cropped."""

    def close(self) -> None:
        """Close the sessions that this cache has opened. It takes no further positions."""
        self._is_closed = True
        self._free()

    def _free(self) -> None:
        if self._fixed is None:
            for session in self._sessions:
                session.close()
            self._sessions = []

    # ---- as the model uses it

    def check(self, ids: Tensor) -> None:
        """Raise SessionClosedError behind `close`, and ArgumentError for a batch of another size."""
        if self._is_closed:
            raise SessionClosedError("past_key_values was closed; begin again without it")
        if self._logs and len(self._logs) != len(ids):
            detail = f"past_key_values has {len(self._logs)} rows; allowed: input_ids with as many"
            raise ArgumentError("past_key_values", f"{detail}, not {len(ids)}")

    def forward(self, ids: Tensor, mask: Tensor | None, keep: int) -> Tensor:
        """Append `ids` [batch, n] and return the logits [batch, keep, vocabulary] of the last `keep` of them.

        `mask` [batch, n]: 0 for padding, whose logits are zeros. A call that fails appends nothing: it can be repeated.
        """
        self.is_used = True
        new = [
            row.tolist() if mask is None else row[mask[place].bool()].tolist()
            for place, row in enumerate(ids)
        ]
        before = self._logs or [[] for _ in ids]
        logs = [[*log, *tokens] for log, tokens in zip(before, new, strict=True)]
        last = (torch.ones_like(ids) if mask is None else mask)[:, -keep:].bool().cpu()
        found = torch.zeros(*last.shape, self._vocabulary)
        try:
            rows = self._read_rows(logs, last.sum(-1).tolist())
        except BaseException:
            if not self._logs:  # no caller has this cache yet, and the error keeps it alive
                self._free()
            raise
        for place, row in enumerate(rows):
            if row is not None:
                found[place, last[place]] = row
        self._logs, self._length = logs, self._length + ids.shape[1]
        return found.to(ids.device)

    def _read_rows(self, logs: list[list[int]], counts: list[int]) -> list[Tensor | None]:
        """Return the logits of the last `counts` entries of each log."""
        wanted: dict[tuple[int, ...], int] = {}
        keys = [
            (place, *log) if self._fixed is not None else (-1, *log)
            for place, log in enumerate(logs)
        ]
        for key, count in zip(keys, counts, strict=True):
            if count:
                wanted[key] = max(count, wanted.get(key, 0))
        sessions = self._assign(list(wanted))

        def read(key: tuple[int, ...]) -> Tensor:
            return read_logits(sessions[key], list(key[1:]), wanted[key])

        by_key = dict(zip(wanted, side_by_side(read, wanted), strict=True))
        return [
            by_key[key][-count:] if count else None for key, count in zip(keys, counts, strict=True)
        ]

    def _assign(self, keys: list[tuple[int, ...]]) -> dict[tuple[int, ...], GatewaySession]:
        """Return a session for each log: one that has most of it, a fork of such a one, or a new one."""
        if self._fixed is not None:
            return {key: self._fixed[key[0]] for key in keys}
        sessions = list(self._sessions)
        sources = choose_sources([each.tokens for each in sessions], [key[1:] for key in keys])
        groups: dict[int | None, list[int]] = {}  # one thread at a time uses a session
        for place, source in enumerate(sources):
            groups.setdefault(source.parent, []).append(place)
        chosen: dict[int, GatewaySession] = {}

        def choose(places: list[int]) -> None:
            for place in places:
                chosen[place] = self._find_session(sources[place], sessions)

        side_by_side(choose, groups.values())
        for place, source in enumerate(sources):
            if source.session is not None and chosen[place] is not sessions[source.session]:
                self._sessions.remove(sessions[source.session])
                sessions[source.session].close()
        return {key: chosen[place] for place, key in enumerate(keys)}

    def _find_session(self, source: Source, sessions: Sequence[GatewaySession]) -> GatewaySession:
        """Return the session of a source; a fork is opened, or a new one. Called before any session is rewound."""
        own = None if source.session is None else sessions[source.session]
        if source.parent is None:
            made = self._open_session() if own is None else own
        else:
            try:
                made = sessions[source.parent].fork(source.position)
            except NoCapacityError:
                if own is None:
                    raise
                made = own
        if made is not own:
            self._sessions.append(made)
        return made


def check_cache(cache: Any, ids: Tensor) -> None:
    """Raise an error unless this is None, or an open cache that the model gave for as many rows."""
    if cache is None:
        return
    if not isinstance(cache, RemoteCache):
        detail = "allowed: that of an earlier result, model(ids, use_cache=True).past_key_values"
        raise ArgumentError("past_key_values", f"a {type(cache).__name__}; {detail}")
    cache.check(ids)


def take_cache(past_key_values: Any, cache: Any, ids: Tensor) -> RemoteCache | None:
    """Return the cache that a forward was given by either of its names. Raise an error as `check_cache` does."""
    if past_key_values is not None and cache is not None:
        raise ArgumentError("cache", "past_key_values is another name of it; pass one of them")
    given: RemoteCache | None = past_key_values if cache is None else cache
    check_cache(given, ids)
    return given
