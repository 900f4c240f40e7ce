"""Loops of transformers: that of `_sample` on tokens that servers have sampled, and the bound of drafts.

Stopping criteria run here, by transformers' own code, on the ids so far. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from typing_extensions import override

from modelswarm.client.hf.rows import TokenRow


def decode_rows(
    rows: Sequence[TokenRow],
    input_ids: Tensor,
    stopping_criteria: Any,
    max_length: int,
    pad: int,
    streamer: Any = None,
) -> Tensor:
    """Return `input_ids` [batch, length] with the rows' tokens behind them; finished rows are padded.

    Without an end token transformers pads no row: all of them go on until the last one is finished. `max_length`:
    positions of the result, at most. All rows are left when it returns or raises.
    """
    pads = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    batch, length = input_ids.shape
    ids = torch.full((batch, max_length), pad, dtype=torch.long, device=input_ids.device)
    ids[:, :length] = input_ids
    unfinished = [True] * batch
    try:
        while any(unfinished) and length < max_length:
            tokens = [
                row.next_token() if unfinished[place] or not pads else None
                for place, row in enumerate(rows)
            ]
            if tokens.count(None) == batch:
                break
            chosen = torch.tensor([pad if token is None else token for token in tokens])
            ids[:, length] = chosen.to(ids.device)
            length += 1
            done = stopping_criteria(ids[:, :length], None).tolist()
            for place, row in enumerate(rows):
                if done[place] or tokens[place] is None:
                    unfinished[place] = False
                    if pads:
                        row.leave()
            if streamer is not None:
                streamer.put(chosen)
    finally:
        for row in rows:
            row.leave()
        if streamer is not None:
            streamer.end()
    return ids[:, :length].clone()


class NotedEnds(StoppingCriteriaList):
    """The criteria of a call, which note how many tokens a row has that they end. The rest of it is padding."""

    def __init__(self, criteria: Sequence[Any], ends: dict[int, int], length: int) -> None:
        """`ends`: gets the tokens behind `length` positions, by row. Without an end token no row is padded."""
        super().__init__(criteria)
        self._ends, self._length = ends, length
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)

    @override
    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        done = super().__call__(input_ids, scores, **options)
        for place, is_done in enumerate(done.tolist()):
            if is_done and self._pads:
                self._ends.setdefault(place, input_ids.shape[1] - self._length)
        return done


def turn_streamer(streamer: Any, read_shown: Callable[[], Tensor | None]) -> SimpleNamespace:
    """Return a streamer that gets the input of one turn in place of the session's whole context."""
    has_prompt = False

    def put(value: Tensor) -> None:
        nonlocal has_prompt
        if not has_prompt:
            has_prompt = True
            shown = read_shown()
            value = value[:, :0] if shown is None else shown.cpu()
        streamer.put(value)

    return SimpleNamespace(put=put, end=streamer.end)


def bound_candidates(generator: Any, max_length: int) -> Any:
    """Return a generator of drafts that end before the last position, behind which the model adds a token.

    That of prompt lookup gives longer ones near the end, for which sessions have no room. They are never accepted.
    """
    find = generator.get_candidates

    def get_candidates(input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        ids, logits = find(input_ids, **given)
        count = max(0, min(ids.shape[1], max_length - 1) - input_ids.shape[1])
        kept = ids[:, : input_ids.shape[1] + count]
        return kept, None if logits is None else logits[:, :count]

    generator.get_candidates = get_candidates
    return generator
