"""The sampler on an accelerator: the rules of `sampler.py`, `filters.py` and `noise.py` in torch's operations.

The host waits once per step, for tokens and log probabilities of all rows together: what it tells the device goes
through pinned memory. Any other copy would wait for the blocks, and so would an index that is a list. Rows that their
best scores do not decide are drawn again from the whole vocabulary. A test compares both samplers. Used by `span.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelswarm.placement.memory import LOGIT_ROWS, sample_rows
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.attention.staging import to_device, to_host, to_index
from modelswarm_serving.model.base import SampleRequest
from modelswarm_serving.model.grammar.masking import apply_masks
from modelswarm_serving.model.sampling.filters import is_filtered
from modelswarm_serving.model.sampling.noise import GOLDEN, MIX_1, MIX_2
from modelswarm_serving.model.sampling.processors import apply_processors
from modelswarm_serving.model.sampling.sampler import (
    Sampled,
    apply_temperature,
    candidate_count,
    log_totals,
    make_result,
    noise_keys,
    top_count,
)

LogitsOf = Callable[[Tensor], Tensor]
_COLUMNS = 4
"""Columns before the top alternatives: token, log probability, whether it is decided, whether all are masked."""


def sample_rows_on_device(
    rows: Tensor, logits_of: LogitsOf, picks: Sequence[SampleRequest]
) -> list[Sampled]:
    """Return a token for each of `rows` [n, hidden], or why there is none.

    `logits_of`: final norm and head. Logits and tables exist for LOGIT_ROWS at a time, as the memory plan counts them.
    A launch takes the host as long for one row as for all of them.
    """
    width = top_count(picks)
    found = to_host(_sample_parts(rows, logits_of, picks, width))
    unsure = [row for row, decided in enumerate(found[:, 2].tolist()) if not decided]
    if unsure:
        again = _sample_parts(
            rows[unsure], logits_of, [picks[row] for row in unsure], width, whole=True
        )
        found[unsure] = to_host(again)
    return [_read_result(pick, row) for pick, row in zip(picks, found.tolist(), strict=True)]


def _read_result(pick: SampleRequest, row: Sequence[float]) -> Sampled:
    token, logprob, _, is_masked = row[:_COLUMNS]
    width = (len(row) - _COLUMNS) // 2
    ids = [int(each) for each in row[_COLUMNS : _COLUMNS + width]]
    return make_result(pick, int(token), logprob, bool(is_masked), ids, row[_COLUMNS + width :])


def _sample_parts(
    rows: Tensor,
    logits_of: LogitsOf,
    picks: Sequence[SampleRequest],
    width: int,
    whole: bool = False,
) -> Tensor:
    parts = []
    for start in range(0, len(picks), LOGIT_ROWS):
        logits = logits_of(rows[start : start + LOGIT_ROWS])
        # Tables of a whole vocabulary in order are three times as large.
        count = sample_rows(logits.shape[1]) if whole else LOGIT_ROWS
        some = picks[start : start + LOGIT_ROWS]
        for first in range(0, len(some), count):
            part = slice(first, first + count)
            parts.append(
                sample_tokens(logits[part], some[part], min(width, logits.shape[1]), whole)
            )
    return torch.cat(parts)


def sample_tokens(
    logits: Tensor, picks: Sequence[SampleRequest], width: int, whole: bool
) -> Tensor:
    """Return [n, _COLUMNS + 2 width] in float64 on the device: the columns, then ids and log probabilities of the top.

    `whole`: filter the whole vocabulary, which decides every row.
    """
    logits = logits.float()
    scores = apply_masks(apply_processors(logits, picks), picks)
    best, tokens = scores.max(dim=-1)
    totals = log_totals(logits, scores, best, tokens)
    is_masked = torch.isneginf(best)
    decided = torch.ones_like(tokens, dtype=torch.float64)
    plain = [i for i, pick in enumerate(picks) if _is_drawn(pick) and not _has_filter(pick)]
    if plain:
        index, values, keys = _drawn_rows(scores, picks, plain)
        everything = torch.arange(scores.shape[1], device=scores.device)
        tokens[index] = (values + gumbel(keys, everything)).argmax(dim=-1)
    filtered = [i for i, pick in enumerate(picks) if _is_drawn(pick) and _has_filter(pick)]
    if filtered:
        index, values, keys = _drawn_rows(scores, picks, filtered)
        tokens[index], sure = _draw_filtered(values, keys, [picks[i] for i in filtered], whole)
        decided[index] = sure.double()
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - totals
    decided = torch.where(is_masked, 1.0, decided)
    columns = [each.double() for each in (tokens, logprobs, decided, is_masked)]
    top = torch.topk(logits, width, dim=-1)
    chances = (top.values - totals[:, None]).double()
    return torch.cat((torch.stack(columns, dim=1), top.indices.double(), chances), dim=1)


def _is_drawn(pick: SampleRequest) -> bool:
    return pick.sampling.temperature > 0.0


def _has_filter(pick: SampleRequest) -> bool:
    return is_filtered(pick.sampling)


def _drawn_rows(
    scores: Tensor, picks: Sequence[SampleRequest], rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index of these rows, their scores after temperature, and their noise keys."""
    device = scores.device
    index = to_index(rows, device)
    some = [picks[row] for row in rows]
    values = apply_temperature(scores[index], [pick.sampling for pick in some])
    return index, values, to_device(torch.from_numpy(noise_keys(some)).view(torch.int64), device)


def _draw_filtered(
    values: Tensor, keys: Tensor, picks: Sequence[SampleRequest], whole: bool
) -> tuple[Tensor, Tensor]:
    """Draw among the best scores of each row; the second tensor tells which rows these scores decide."""
    samplings = [pick.sampling for pick in picks]
    vocab = values.shape[1]
    width = vocab if whole else candidate_count(samplings, vocab)
    best, ids = torch.topk(values, width, dim=-1)
    rules = [(float(s.top_k), s.top_p, s.min_p) for s in samplings]
    table = to_device(torch.tensor(rules, dtype=torch.float64), values.device)
    top_k, top_p, min_p = table.unbind(1)
    has_k = (top_k > 0) & (top_k <= width)
    rank = torch.where(has_k, top_k - 1, 0.0).long()[:, None]
    kth = torch.where(has_k, best.gather(1, rank)[:, 0], -math.inf)
    mass = torch.where(best >= kth[:, None], (best - best[:, :1]).exp(), 0.0)
    sums = mass.cumsum(1)
    whole_mass = (torch.logsumexp(values, dim=-1) - best[:, 0]).exp()
    before = (sums - mass) / torch.where(has_k, sums[:, -1], whole_mass)[:, None]
    in_nucleus = (before < top_p[:, None]) & (mass > 0.0)
    in_nucleus[:, 0] = True  # one token always stays
    smallest = torch.where(in_nucleus, best, math.inf).amin(1)
    lowest = torch.maximum(kth, torch.where(top_p < 1.0, smallest, -math.inf))
    lowest = torch.maximum(lowest, best[:, 0] + min_p.log())
    kept = torch.where(best >= lowest[:, None], best, -math.inf)
    kept = _keep_typical(kept, samplings)
    winners = (kept + gumbel(keys, ids)).argmax(dim=-1, keepdim=True)
    sure = ((top_k < width) & (lowest > best[:, -1])) | torch.isneginf(best[:, -1])
    return ids.gather(1, winners)[:, 0], sure if width < vocab else torch.ones_like(sure)


def _keep_typical(kept: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Apply the rule of `filters.keep_typical` to [S, K]."""
    rows = [row for row, sampling in enumerate(samplings) if sampling.typical_p < 1.0]
    if not rows:
        return kept
    index = to_index(rows, kept.device)
    limits = torch.tensor([[samplings[row].typical_p] for row in rows], dtype=torch.float64)
    some = kept[index]
    log_mass = torch.log_softmax(some, dim=-1)
    mass = log_mass.exp()
    entropy = torch.where(mass > 0.0, -mass * log_mass, 0.0).sum(dim=-1, keepdim=True)
    distance, order = (-log_mass - entropy).abs().sort(dim=-1, stable=True)
    sums = mass.gather(1, order).cumsum(1)
    last = (sums < to_device(limits, kept.device)).sum(dim=-1, keepdim=True)
    farthest = distance.gather(1, last.clamp(max=some.shape[1] - 1))
    is_far = torch.empty_like(some, dtype=torch.bool).scatter(1, order, distance > farthest)
    return kept.index_copy(0, index, some.masked_fill(is_far, -math.inf))


def gumbel(keys: Tensor, tokens: Tensor) -> Tensor:
    """Return the noise of `noise.gumbel`; 64-bit words are int64, whose products wrap around alike."""
    words = keys + (tokens + 1) * _signed(GOLDEN)
    words = (words ^ _shift_right(words, 30)) * _signed(MIX_1)
    words = (words ^ _shift_right(words, 27)) * _signed(MIX_2)
    words = words ^ _shift_right(words, 31)
    uniform = (_shift_right(words, 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift zeros in from the left, where int64 shifts in the sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
