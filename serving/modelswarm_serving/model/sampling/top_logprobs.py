"""The most probable tokens beside a sampled one, for requests that ask for them.

Used by both samplers with the unchanged logits: neither penalties nor temperature count. Rows that ask for nothing cost
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modelswarm.protocol.messages import TopLogprob
from modelswarm_serving.model.base import SampledToken, SampleRequest


def asking_rows(picks: Sequence[SampleRequest]) -> list[int]:
    return [row for row, pick in enumerate(picks) if pick.sampling.logprobs > 0]


def add_top_logprobs(
    sampled: Sequence[SampledToken | None], logprobs: Tensor, picks: Sequence[SampleRequest]
) -> list[SampledToken | None]:
    """Return the tokens with their top alternatives. `logprobs` [n, vocab]: log probabilities of the same rows."""
    asking = asking_rows(picks)
    made = list(sampled)
    if not asking:
        return made
    width = min(max(picks[row].sampling.logprobs for row in asking), logprobs.shape[1])
    best, ids = torch.topk(logprobs[asking], width, dim=-1)
    for row, values, tokens in zip(asking, best.tolist(), ids.tolist(), strict=True):
        token = made[row]
        if token is not None:
            count = picks[row].sampling.logprobs
            made[row] = replace(token, top=_entries(tokens[:count], values[:count]))
    return made


def _entries(tokens: Sequence[int], values: Sequence[float]) -> tuple[TopLogprob, ...]:
    return tuple(map(TopLogprob, tokens, values))
