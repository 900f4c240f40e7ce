"""The servers' sampler on the logits of a whole model: the reference for answers of `generate` with sampling."""

from __future__ import annotations

from typing import Any

import torch
from support.processes.oracles import TAU, check_tokens, logits_of
from support.processes.streams import Answer, Request

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.sampling.sampler import sample

_NEAR = 16  # logits near those of the whole model, each with other rounding


def next_seeds(count: int) -> list[int]:
    """Return the seeds of the next rows that `generate` samples after this state of torch's generator."""
    seeds: list[int] = torch.randint(0, (1 << 63) - 1, (count,)).tolist()
    return seeds


def check_sampled(model: Any, log: list[int], first: int, sampling: Sampling) -> None:
    """Check that the tokens log[first:] are those which the sampler draws on the whole model's logits."""
    prompt, tokens = tuple(log[:first]), tuple(log[first:])
    positions = tuple(range(first, len(log)))
    request = Request(prompt, len(tokens), sampling)
    check_tokens(model, Answer(request, tokens, positions, "", "length"))


def check_sampled_near(model: Any, log: list[int], first: int, sampling: Sampling) -> None:
    """Check the same for filters without a known margin, such as typical_p.

    Each token is one that the sampler draws on logits which differ from the whole model's by TAU at most.
    """
    rows = logits_of(model, log[:-1])[first - 1 :]
    noise = torch.rand((_NEAR, *rows.shape), generator=torch.Generator().manual_seed(0)) * 2 - 1
    noise[0] = 0
    places = range(first, len(log))
    picks = [SampleRequest(sampling, place, log[:place], first) for place in places]
    near = [sample(rows + TAU * each, picks) for each in noise]
    for place, token, found in zip(places, log[first:], zip(*near, strict=True), strict=True):
        drawn = {each.token for each in found if isinstance(each, SampledToken)}
        assert token in drawn, f"entry {place} is {token}; the sampler draws {drawn}"
