"""Oracles of docs/protocol.md ("The same output"): checks of answers of real swarms.

1. On the hash model an answer equals the reference exactly.
2. On a transformer every token is what the whole model picks on the same log, or within `TAU` of it.
3. An answer with kills equals the one without, for their common length or up to a token whose margin is below `TAU`.

`TAU` was measured on the tests' model (`test_the_margin_is_far_above_rounding`). Four spans read their prompt in parts.
Their logits (standard deviation 1.2) differ from those of the whole model by 1.3e-5 at most, over 900 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from support.models.margins import margin
from support.models.tiny_models import JUDGED
from support.processes.streams import Answer
from transformers import PreTrainedModel

from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.hash_model import reference_tokens
from modelswarm_serving.model.sampling.sampler import sample

TAU = 2e-4  # in logits


@torch.no_grad()
def logits_of(model: PreTrainedModel, log: Sequence[int]) -> torch.Tensor:
    """Return logits [len(log), vocab]: row i is what entry i + 1 is picked from."""
    run: Any = model
    logits: torch.Tensor = run(torch.tensor([list(log)])).logits[0]
    return logits


def check_tokens(model: PreTrainedModel, answer: Answer) -> int:
    """Check oracle 2; return the number of near ties that were picked differently."""
    margins, picked = _teacher_forced(model, answer)
    first = len(answer.request.prompt)
    flips = 0
    for index, (token, right, distance) in enumerate(
        zip(answer.tokens, picked, margins, strict=True)
    ):
        if token != right:
            assert distance <= TAU, (
                f"entry {first + index} is {token}; the model picks {right} by {distance:.2g}"
            )
            flips += 1
    JUDGED.tokens += len(margins)
    JUDGED.near_ties += sum(distance <= TAU for distance in margins)
    JUDGED.flips += flips
    return flips


def check_twins(model: PreTrainedModel, calm: Answer, killed: Answer) -> None:
    """Check oracle 3. The answer with kills may have been cancelled."""
    if calm.tokens == killed.tokens:
        assert (calm.text, calm.finish) == (killed.text, killed.finish)
        return
    both = zip(calm.tokens, killed.tokens, strict=False)
    parted = next((i for i, (a, b) in enumerate(both) if a != b), None)
    if parted is None:
        assert not killed.finish, (
            f"{len(calm.tokens)} tokens without a kill, {len(killed.tokens)} with"
        )
        return
    margins, _ = _teacher_forced(model, killed)
    assert margins[parted] <= TAU, (
        f"token {parted} is {killed.tokens[parted]}, without a kill {calm.tokens[parted]}, "
        f"by a margin of {margins[parted]:.2g}"
    )


def check_hash(answer: Answer, *, n_blocks: int, vocabulary: int, length: int) -> None:
    """Check oracle 1. An answer that was cancelled, or ended by a stop string, is a prefix of the reference."""
    request = answer.request
    is_whole = answer.finish and not (request.stop and answer.finish == "stop")
    new = request.new if is_whole else len(answer.tokens)
    right = reference_tokens(
        request.prompt,
        request.sampling,
        new,
        min(length, len(request.prompt) + new),
        n_blocks=n_blocks,
        vocabulary=vocabulary,
    )
    assert list(answer.tokens) == right


def check_contiguous(answer: Answer) -> None:
    """Check that no token is lost or repeated, and that an answer that was not cancelled is complete."""
    first = len(answer.request.prompt)
    assert answer.positions == tuple(range(first, first + len(answer.tokens)))
    if answer.finish and not answer.request.stop and not answer.request.sampling.eos:
        assert len(answer.tokens) == answer.request.new
        assert answer.finish == "length"


def _teacher_forced(model: PreTrainedModel, answer: Answer) -> tuple[list[float], list[int]]:
    """Return margins and picks of the whole model at every generated entry of this log."""
    log, sampling = answer.log, answer.request.sampling
    first = len(answer.request.prompt)
    rows = logits_of(model, log[:-1])[first - 1 :]
    picks = [
        SampleRequest(sampling, position, log[:position], first)
        for position in range(first, len(log))
    ]
    picked = [found.token for found in sample(rows, picks) if isinstance(found, SampledToken)]
    margins = [margin(row, pick) for row, pick in zip(rows, picks, strict=True)]
    return margins, picked
