"""The servers' sampler on the logits of a whole model: the reference for answers of `generate` with sampling."""

from __future__ import annotations

from typing import Any

import torch
from support.processes.oracles import check_tokens
from support.processes.streams import Answer, Request

from modelswarm.protocol.messages import Sampling


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
