"""Samples the next token of many sessions at once, each by its own parameters.

Called by the tail's span with the logits of the rows that have a sample request. A token is a pure function of (logits,
parameters, log, begin, position): see `noise.py` for R17 (sampling), `processors.py` for the order of all steps. Log
probabilities are those of the unchanged logits. Knows nothing of sessions or models.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from modelswarm.protocol.messages import FaultKind, Sampling, TopLogprob
from modelswarm_serving.model.attention.staging import to_device
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.grammar.masking import apply_masks
from modelswarm_serving.model.sampling.filters import (
    Flags,
    find_thresholds,
    is_decided,
    is_filtered,
    keep_typical,
)
from modelswarm_serving.model.sampling.noise import Floats, Ids, Words, draw_key, gumbel
from modelswarm_serving.model.sampling.processors import apply_processors

_CANDIDATES = 256
"""Best scores per row that are tried first when top-p or min-p filter."""
_MAX_CANDIDATES = 1024
"""With a larger top-k the first try uses _CANDIDATES scores, and the second one the whole row."""


class Unsampled(enum.Enum):
    """Cause of a row without a token; the value is the sentence that ends its session."""

    NOT_FINITE = "the model's logits are not finite"
    ALL_MASKED = (
        "the sampling parameters leave no token to sample; loosen allowed_token_ids, bad_words,"
        " no_repeat_ngram_size or min_tokens"
    )

    @property
    def fault(self) -> FaultKind:
        return FaultKind.NOT_FINITE if self is Unsampled.NOT_FINITE else FaultKind.NO_TOKEN


Sampled: TypeAlias = SampledToken | Unsampled


def sample(logits: Tensor, picks: Sequence[SampleRequest]) -> list[Sampled]:
    """Return a token for each row of `logits` [n, vocab], or why there is none."""
    logits = logits.float()
    scores = apply_masks(apply_processors(logits, picks), picks)
    best, tokens = scores.max(dim=-1)
    is_masked = [score == -math.inf for score in best.tolist()]
    totals = log_totals(logits, scores, best, tokens)
    drawn = [
        i
        for i, (pick, total) in enumerate(zip(picks, totals.tolist(), strict=True))
        if pick.sampling.temperature > 0.0 and not is_masked[i] and math.isfinite(total)
    ]
    if drawn:
        rows = scores if len(drawn) == len(picks) else scores[drawn]
        tokens[drawn] = torch.from_numpy(_draw(rows, [picks[i] for i in drawn])).to(tokens.device)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - totals
    width = min(top_count(picks), logits.shape[1])
    top = torch.topk(logits, width, dim=-1)
    return [
        make_result(pick, *found)
        for pick, *found in zip(
            picks,
            tokens.tolist(),
            logprobs.tolist(),
            is_masked,
            top.indices.tolist(),
            (top.values - totals[:, None]).tolist(),
            strict=True,
        )
    ]


def log_totals(logits: Tensor, scores: Tensor, best: Tensor, tokens: Tensor) -> Tensor:
    """Return logsumexp of each row of the logits; `best`, `tokens`: the largest of the scores, and where it is.

    log_softmax is one kernel, logsumexp eight. After a step's products their code is no longer in the caches: they took
    115 us.
    """
    if scores is not logits:
        best, tokens = logits.max(dim=-1)
    return best - torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]


def top_count(picks: Sequence[SampleRequest]) -> int:
    """Return the number of top alternatives that any of the requests asks for."""
    return max((pick.sampling.logprobs for pick in picks), default=0)


def make_result(
    pick: SampleRequest,
    token: int,
    logprob: float,
    is_masked: bool,
    ids: Sequence[int],
    values: Sequence[float],
) -> Sampled:
    """Return the result of a row. `ids`, `values`: at least as many top alternatives as the request asks for."""
    if not math.isfinite(logprob):
        return Unsampled.NOT_FINITE
    if is_masked:
        return Unsampled.ALL_MASKED
    wanted = pick.sampling.logprobs
    top = tuple(map(TopLogprob, ids[:wanted], values[:wanted]))
    return SampledToken(token, logprob, top)


def apply_temperature(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Divide by the temperatures, in float64: the noise decides among scores that float32 would round together."""
    temperatures = [sampling.temperature for sampling in samplings]
    return scores.double() / to_device(torch.tensor(temperatures), scores.device).double()[:, None]


def noise_keys(picks: Sequence[SampleRequest]) -> Words:
    """Return the noise key of each request, [n, 1]."""
    keys = [draw_key(p.sampling.seed, p.sampling.choice, p.position) for p in picks]
    return np.array(keys, dtype=np.uint64)[:, None]


def _draw(scores: Tensor, picks: Sequence[SampleRequest]) -> Ids:
    """Draw tokens for rows with a temperature; rows without filters draw from the whole vocabulary."""
    samplings = [pick.sampling for pick in picks]
    values = apply_temperature(scores, samplings)
    keys = noise_keys(picks)
    tokens = np.zeros(len(picks), dtype=np.int64)
    plain = [i for i, sampling in enumerate(samplings) if not is_filtered(sampling)]
    if plain:
        everything = np.arange(scores.shape[1], dtype=np.int64)[None]
        tokens[plain] = gumbel_max(values[plain].cpu().numpy(), everything, keys[plain])
    rest = [i for i, sampling in enumerate(samplings) if is_filtered(sampling)]
    width = candidate_count(samplings, scores.shape[1])
    while rest:
        chosen, done = _draw_filtered(values[rest], [samplings[i] for i in rest], keys[rest], width)
        tokens[[i for i, ok in zip(rest, done, strict=True) if ok]] = chosen[done]
        rest = [i for i, ok in zip(rest, done, strict=True) if not ok]
        width = scores.shape[1]
    return tokens


def candidate_count(samplings: Sequence[Sampling], vocab: int) -> int:
    widest = max(sampling.top_k for sampling in samplings) + 1
    wanted = max(_CANDIDATES, widest) if widest <= _MAX_CANDIDATES else _CANDIDATES
    return min(wanted, vocab)


def _draw_filtered(
    values: Tensor, samplings: Sequence[Sampling], keys: Words, width: int
) -> tuple[Ids, Flags]:
    """Draw among the `width` best scores of each row; the flags tell which rows these scores decide."""
    best, ids = torch.topk(values, width, dim=-1)
    top = best.cpu().numpy()
    totals = torch.logsumexp(values, dim=-1).cpu().numpy()
    thresholds = find_thresholds(top, totals, samplings)
    kept = keep_typical(np.where(top >= thresholds.min_score[:, None], top, -np.inf), samplings)
    return gumbel_max(kept, ids.cpu().numpy(), keys), is_decided(
        thresholds, top, samplings, values.shape[1]
    )


def gumbel_max(values: Floats, ids: Ids, keys: Words) -> Ids:
    """Return the token id with the largest score plus noise, per row."""
    runs = values + gumbel(keys, ids)
    winners = runs.argmax(axis=1)
    chosen: Ids = np.take_along_axis(np.broadcast_to(ids, runs.shape), winners[:, None], axis=1)
    return chosen[:, 0]
