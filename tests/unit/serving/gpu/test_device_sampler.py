"""The sampler of accelerators draws the tokens of the sampler of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.models.sampling.sampling_cases import LOG, SAMPLINGS, VOCAB

from modelswarm_serving.model.base import SampleRequest
from modelswarm_serving.model.sampling import sampler
from modelswarm_serving.model.sampling.device_sampler import gumbel, sample_rows_on_device
from modelswarm_serving.model.sampling.noise import draw_key
from modelswarm_serving.model.sampling.noise import gumbel as gumbel_of_the_cpu
from modelswarm_serving.model.sampling.sampler import Unsampled, sample


def make_case(seed: int) -> tuple[torch.Tensor, list[SampleRequest]]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(SAMPLINGS), VOCAB, generator=generator) * 2
    return logits, [SampleRequest(s, seed + i, LOG, begin=2) for i, s in enumerate(SAMPLINGS)]


@pytest.mark.parametrize("candidates", [2, 17, 256])
def test_tokens_equal_those_of_the_cpu_sampler(
    candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few candidates most rows are undecided, and are drawn again from the whole vocabulary."""
    monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
    monkeypatch.setattr(sampler, "_MAX_CANDIDATES", candidates)
    for seed in range(20):
        logits, picks = make_case(seed)
        found = sample_rows_on_device(logits, lambda rows: rows, picks)
        assert found == sample(logits, picks)


def test_row_with_non_finite_logits_gives_no_token() -> None:
    logits, picks = make_case(1)
    logits[4, 17] = float("nan")
    found = sample_rows_on_device(logits, lambda rows: rows, picks)
    assert [i for i, picked in enumerate(found) if picked is Unsampled.NOT_FINITE] == [4]


def test_noise_equals_that_of_the_cpu() -> None:
    keys = np.array([[draw_key(seed, 1, 5)] for seed in range(50)], dtype=np.uint64)
    tokens = np.arange(VOCAB)
    expected = gumbel_of_the_cpu(keys, tokens[None])
    found = gumbel(torch.from_numpy(keys).view(torch.int64), torch.from_numpy(tokens))
    assert found.numpy() == pytest.approx(expected, abs=1e-12)
