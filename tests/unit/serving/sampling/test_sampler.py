"""The sampler picks tokens that the rules of transformers allow, with noise from a counter alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.models.margins import margin
from support.models.sampling.hf_processors import filtered_by_transformers
from support.models.sampling.sampling_cases import BEGIN, LOG, SAMPLINGS, VOCAB
from torch import Tensor

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.sampling import sampler
from modelswarm_serving.model.sampling.noise import draw_key, gumbel
from modelswarm_serving.model.sampling.prompt_scores import read_scores, score_tokens
from modelswarm_serving.model.sampling.sampler import Sampled, Unsampled, sample


def make_logits(seed: int, rows: int = 1, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * spread


def sample_one(row: Tensor, sampling: Sampling, position: int = 6) -> SampledToken:
    (picked,) = sample(row[None], [SampleRequest(sampling, position, LOG, begin=BEGIN)])
    assert isinstance(picked, SampledToken)
    return picked


def token_of(picked: Sampled) -> int:
    assert isinstance(picked, SampledToken)
    return picked.token


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_sampled_token_matches_the_filters_of_transformers(sampling: Sampling) -> None:
    """The maximum of scores plus noise is the same over the scores that transformers allows."""
    for seed in range(20):
        row = make_logits(seed)[0]
        scores = filtered_by_transformers(row, sampling, LOG, BEGIN).double()
        picked = sample_one(row, sampling, position=seed)
        if sampling.temperature > 0:
            key = draw_key(sampling.seed, sampling.choice, seed)
            noise = gumbel(np.array([[key]], dtype=np.uint64), np.arange(VOCAB)[None])[0]
            scores = scores + torch.from_numpy(noise)
        assert picked.token == int(scores.argmax())
        expected = torch.log_softmax(row, dim=-1)[picked.token]
        assert picked.logprob == pytest.approx(float(expected), abs=1e-5)


def test_sampled_token_is_independent_of_the_batch() -> None:
    rows = make_logits(1, len(SAMPLINGS))
    requests = [
        SampleRequest(sampling, 10 + i, LOG, begin=BEGIN) for i, sampling in enumerate(SAMPLINGS)
    ]
    together = sample(rows, requests)
    alone = [sample(rows[i : i + 1], [request])[0] for i, request in enumerate(requests)]
    backwards = sample(rows.flip(0), requests[::-1])[::-1]
    assert [token_of(picked) for picked in together] == [token_of(picked) for picked in alone]
    assert [token_of(picked) for picked in together] == [token_of(picked) for picked in backwards]


@pytest.mark.parametrize("candidates", [2, 17, VOCAB])
def test_candidate_shortcut_changes_no_result(
    candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_logits(2, len(SAMPLINGS), spread=0.5)
    requests = [
        SampleRequest(sampling, i, LOG, begin=BEGIN) for i, sampling in enumerate(SAMPLINGS)
    ]
    expected = sample(rows, requests)
    monkeypatch.setattr(sampler, "_CANDIDATES", candidates)
    monkeypatch.setattr(sampler, "_MAX_CANDIDATES", candidates)
    assert sample(rows, requests) == expected


def test_equal_scores_at_a_cutoff_are_all_kept() -> None:
    row = torch.zeros(VOCAB)
    row[100:110] = 5.0
    sampling = Sampling(temperature=1.0, top_k=3, seed=1)
    tokens = {sample_one(row, sampling, position).token for position in range(200)}
    assert tokens == set(range(100, 110))


def test_sampled_frequencies_follow_the_softmax() -> None:
    row = torch.full((VOCAB,), -30.0)
    row[:4] = torch.tensor([0.0, 0.5, 1.0, 2.0])
    expected = torch.softmax(row, dim=-1)[:4]
    count = 4000
    requests = [
        SampleRequest(Sampling(temperature=1.0, seed=11), position, (), 0)
        for position in range(count)
    ]
    drawn = sample(row.expand(count, -1), requests)
    tokens = torch.tensor([picked.token for picked in drawn if isinstance(picked, SampledToken)])
    frequencies = torch.bincount(tokens, minlength=4)[:4] / count
    assert torch.allclose(frequencies, expected, atol=4 * math.sqrt(0.25 / count))


def test_seed_choice_and_position_each_change_the_noise() -> None:
    base = draw_key(1, 0, 5)
    others = {draw_key(2, 0, 5), draw_key(1, 1, 5), draw_key(1, 0, 6), draw_key(5, 0, 1)}
    assert len(others | {base}) == 5


def test_noise_values_are_fixed() -> None:
    """A gateway replays tokens that an older server sampled, so these numbers are part of the protocol."""
    key = draw_key(1, 0, 5)
    assert key == 0x0F3DD8A1E741E653
    noise = gumbel(np.array([[key]], dtype=np.uint64), np.arange(3)[None])
    assert noise[0] == pytest.approx([1.48013275, 0.10039607, 1.26038243])


def test_row_with_non_finite_logits_alone_gives_no_token() -> None:
    rows = make_logits(3, 3)
    rows[1, 17] = float("nan")
    found = sample(rows, [SampleRequest(Sampling(), 0, LOG, begin=BEGIN)] * 3)
    assert [picked is Unsampled.NOT_FINITE for picked in found] == [False, True, False]


@pytest.mark.parametrize("sampling", [s for s in SAMPLINGS if s.typical_p == 1.0])
def test_noise_below_the_margin_changes_no_token(sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(4)
    checked = 0
    for seed in range(60):
        row = make_logits(seed)[0]
        limit = margin(row, SampleRequest(sampling, seed, LOG, begin=BEGIN))
        if math.isinf(limit) or limit < 1e-5:
            continue
        checked += 1
        change = (torch.rand(VOCAB, generator=generator) - 0.5) * 0.9 * limit
        if sampling.repetition_penalty > 1:
            change /= sampling.repetition_penalty
        assert (
            sample_one(row + change, sampling, seed).token == sample_one(row, sampling, seed).token
        )
    assert checked > 20 or sampling.top_p == 0.0


def test_change_beyond_the_margin_can_change_the_token() -> None:
    row = torch.zeros(VOCAB)
    row[10], row[20] = 5.0, 4.9
    assert margin(row, SampleRequest(Sampling(), 0, LOG, begin=BEGIN)) == pytest.approx(
        0.1, abs=1e-6
    )
    row[20] += 0.11
    assert sample_one(row, Sampling()).token == 20


def test_margin_includes_tokens_just_below_a_filter() -> None:
    """A token 0.001 below a filter, with high noise, would be sampled if it passed the filter."""
    row = torch.full((VOCAB,), -50.0)
    sampling = Sampling(temperature=1.0, top_k=1, seed=3)
    row[10], row[20] = 5.0, 4.999
    limits = [margin(row, SampleRequest(sampling, position, LOG, 2)) for position in range(40)]
    assert min(limits) == pytest.approx(0.001, abs=1e-4)


def test_targets_are_scored_by_the_unchanged_distribution() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
    targets = [3, 0, 39, 7, 7]
    expected = torch.log_softmax(logits, dim=-1)
    [scores] = read_scores([score_tokens(logits, targets, 2)], [targets])
    for row, (score, target) in enumerate(zip(scores, targets, strict=True)):
        assert (score.token, len(score.top)) == (target, 2)
        assert score.logprob == pytest.approx(expected[row, target].item())
        assert score.top[0].token == int(expected[row].argmax())
        assert score.top[0].logprob >= score.top[1].logprob
