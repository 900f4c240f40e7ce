"""Samples the next token of many sessions at once, each by its own parameters.

Called by the tail's span with the logits of the rows that have a sample request. A token is a pure function of (logits,
parameters, log, position): see `noise.py` for R17 (sampling). Order: penalty, temperature, the filters of
`filters.py`, Gumbel-max. Knows nothing of sessions, stop tokens or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.sampling.filters import (
    Flags,
    find_thresholds,
    is_decided,
    is_filtered,
)
from modelswarm_serving.model.sampling.noise import Floats, Ids, Words, draw_key, gumbel
from modelswarm_serving.model.sampling.top_logprobs import add_top_logprobs

_CANDIDATES = 256
"""Best scores per row that are tried first when top-p or min-p filter."""
_MAX_CANDIDATES = 1024
"""With a larger top-k the first try uses _CANDIDATES scores, and the second one the whole row."""


def sample(logits: Tensor, picks: Sequence[SampleRequest]) -> list[SampledToken | None]:
    """Return a token for each row of `logits` [n, vocab]; None where the logits are not finite."""
    logits = logits.float()
    scores = apply_penalty(logits, picks)
    tokens = scores.argmax(dim=-1)
    drawn = [i for i, pick in enumerate(picks) if pick.sampling.temperature > 0.0]
    if drawn:
        rows = scores if len(drawn) == len(picks) else scores[drawn]
        tokens[drawn] = torch.from_numpy(_draw(rows, [picks[i] for i in drawn])).to(tokens.device)
    table = torch.log_softmax(logits, dim=-1)
    logprobs = table.gather(1, tokens[:, None])[:, 0]
    sampled = [
        SampledToken(token, logprob) if math.isfinite(logprob) else None
        for token, logprob in zip(tokens.tolist(), logprobs.tolist(), strict=True)
    ]
    return add_top_logprobs(sampled, table, picks)


def apply_penalty(logits: Tensor, picks: Sequence[SampleRequest]) -> Tensor:
    """Apply the repetition penalty once per distinct token of the log (transformers'
    `RepetitionPenaltyLogitsProcessor`). Return the input itself if no row has a penalty."""
    if all(pick.sampling.repetition_penalty == 1.0 for pick in picks):
        return logits
    scores = logits.clone()
    for row, pick in enumerate(picks):
        penalty = pick.sampling.repetition_penalty
        if penalty != 1.0 and pick.log:
            seen = torch.tensor(list(set(pick.log)), device=logits.device)
            before = logits[row, seen]
            scores[row, seen] = torch.where(before < 0, before * penalty, before / penalty)
    return scores


def apply_temperature(scores: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Divide by the temperatures, in float64: the noise decides among scores that float32 would round together."""
    temperatures = [sampling.temperature for sampling in samplings]
    return scores.double() / torch.tensor(temperatures, device=scores.device).double()[:, None]


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
    kept = np.where(top >= thresholds.min_score[:, None], top, -np.inf)
    return gumbel_max(kept, ids.cpu().numpy(), keys), is_decided(
        thresholds, top, samplings, values.shape[1]
    )


def gumbel_max(values: Floats, ids: Ids, keys: Words) -> Ids:
    """Return the token id with the largest score plus noise, per row."""
    runs = values + gumbel(keys, ids)
    winners = runs.argmax(axis=1)
    chosen: Ids = np.take_along_axis(np.broadcast_to(ids, runs.shape), winners[:, None], axis=1)
    return chosen[:, 0]
