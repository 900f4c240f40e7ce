"""The sampler on an accelerator: the rules of `sampler.py`, `filters.py` and `noise.py` in torch's operations.

The host waits once per step, for tokens and log probabilities of all rows together. Rows that their best scores do not
decide are drawn again from the whole vocabulary. A test compares both samplers. Used by `span.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from modelswarm.placement.memory import LOGIT_ROWS, sample_rows
from modelswarm_serving.model.attention.staging import to_device, to_host
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.sampling.filters import is_filtered
from modelswarm_serving.model.sampling.noise import GOLDEN, MIX_1, MIX_2
from modelswarm_serving.model.sampling.sampler import (
    apply_penalty,
    apply_temperature,
    candidate_count,
    noise_keys,
)
from modelswarm_serving.model.sampling.top_logprobs import add_top_logprobs, asking_rows

LogitsOf = Callable[[Tensor], Tensor]


def sample_rows_on_device(
    rows: Tensor, logits_of: LogitsOf, picks: Sequence[SampleRequest]
) -> list[SampledToken | None]:
    """Return a token for each of `rows` [n, hidden]; None where the logits are not finite.

    `logits_of`: final norm and head. Logits and tables exist for some rows at a time, as the memory plan counts them.
    """
    found = to_host(_sample_parts(rows, logits_of, picks, whole=False))
    unsure = [row for row, decided in enumerate(found[:, 2].tolist()) if not decided]
    if unsure:
        again = _sample_parts(rows[unsure], logits_of, [picks[row] for row in unsure], whole=True)
        found[unsure] = to_host(again)
    sampled = [
        SampledToken(int(token), logprob) if math.isfinite(logprob) else None
        for token, logprob, _ in found.tolist()
    ]
    return _with_top(sampled, rows, logits_of, picks)


def _with_top(
    sampled: list[SampledToken | None],
    rows: Tensor,
    logits_of: LogitsOf,
    picks: Sequence[SampleRequest],
) -> list[SampledToken | None]:
    """Add the top alternatives to the rows that ask for them; their logits are computed once more."""
    asking = asking_rows(picks)
    for start in range(0, len(asking), LOGIT_ROWS):
        part = asking[start : start + LOGIT_ROWS]
        table = torch.log_softmax(logits_of(rows[part]).float(), dim=-1)
        tokens = [sampled[row] for row in part]
        made = add_top_logprobs(tokens, table, [picks[row] for row in part])
        for row, token in zip(part, made, strict=True):
            sampled[row] = token
    return sampled


def _sample_parts(
    rows: Tensor, logits_of: LogitsOf, picks: Sequence[SampleRequest], whole: bool
) -> Tensor:
    parts = []
    for start in range(0, len(picks), LOGIT_ROWS):
        logits = logits_of(rows[start : start + LOGIT_ROWS])
        count = sample_rows(logits.shape[1])
        some = picks[start : start + LOGIT_ROWS]
        for first in range(0, len(some), count):
            part = slice(first, first + count)
            parts.append(sample_tokens(logits[part], some[part], whole))
    return torch.cat(parts)


def sample_tokens(logits: Tensor, picks: Sequence[SampleRequest], whole: bool) -> Tensor:
    """Return [n, 3] in float64 on the device: token, log probability, and 1 where the token is decided.

    `whole`: filter the whole vocabulary, which decides every row.
    """
    logits = logits.float()
    scores = apply_penalty(logits, picks)
    tokens = scores.argmax(dim=-1)
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
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])[:, 0]
    return torch.stack((tokens.double(), logprobs.double(), decided), dim=1)


def _is_drawn(pick: SampleRequest) -> bool:
    return pick.sampling.temperature > 0.0


def _has_filter(pick: SampleRequest) -> bool:
    return is_filtered(pick.sampling)


def _drawn_rows(
    scores: Tensor, picks: Sequence[SampleRequest], rows: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the index of these rows, their scores after temperature, and their noise keys."""
    device = scores.device
    index = to_device(torch.tensor(rows), device)
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
    winners = (kept + gumbel(keys, ids)).argmax(dim=-1, keepdim=True)
    sure = (top_k < width) & (lowest > best[:, -1])
    return ids.gather(1, winners)[:, 0], sure if width < vocab else torch.ones_like(sure)


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
