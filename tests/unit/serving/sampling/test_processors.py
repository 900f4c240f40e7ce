"""Bias, penalties and masks change the scores as transformers' processors do, and the draws follow these scores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.sampling.hf_processors import (
    filtered_by_transformers,
    processed_by_transformers,
)
from support.models.sampling.sampling_cases import SAMPLINGS
from torch import Tensor
from typing_extensions import override

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import SampledToken, SampleRequest
from modelswarm_serving.model.sampling.device_sampler import sample_rows_on_device
from modelswarm_serving.model.sampling.processors import (
    TableCache,
    apply_processors,
    repeated_ngram_ends,
)
from modelswarm_serving.model.sampling.sampler import Sampled, Unsampled, sample

VOCAB, DRAWS = 500, 3000
CASES = (
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8),
    Sampling(presence_penalty=1.5),
    Sampling(frequency_penalty=-0.8),
    Sampling(presence_penalty=-2.0, frequency_penalty=2.0),
    Sampling(no_repeat_ngram_size=1),
    Sampling(no_repeat_ngram_size=2),
    Sampling(no_repeat_ngram_size=3),
    Sampling(no_repeat_ngram_size=60),
    Sampling(logit_bias=((0, 100.0), (7, -100.0), (499, 0.25))),
    Sampling(bad_words=((4,), (1, 5), (0, 1, 6), (1, 1, 1, 7))),
    Sampling(min_tokens=19, eos=(2, 4)),
    Sampling(min_tokens=20, eos=(2, 4)),
    Sampling(min_tokens=21, eos=(2, 4)),
    Sampling(allowed_tokens=(3, 1, 4, 1, 5)),
    *SAMPLINGS,
)


def make_row(seed: int) -> Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def make_log(seed: int) -> list[int]:
    """Return 40 entries of few tokens, so that n-grams and prefixes repeat."""
    generator = torch.Generator().manual_seed(seed)
    log: list[int] = torch.randint(0, 4, (40,), generator=generator).tolist()
    return log


@pytest.mark.parametrize("sampling", CASES)
def test_scores_equal_those_of_transformers(sampling: Sampling) -> None:
    for seed in range(12):
        row, log = make_row(seed), make_log(seed)
        expected = processed_by_transformers(row, sampling, log, begin=20)
        (found,) = apply_processors(row[None], [SampleRequest(sampling, len(log), log, 20)])
        assert torch.equal(found.isneginf(), expected.isneginf())
        assert torch.allclose(found, expected, rtol=0, atol=1e-6)


def test_rows_of_one_step_have_parameters_of_their_own() -> None:
    logits = torch.stack([make_row(seed) for seed in range(len(CASES))])
    before = logits.clone()
    picks = [SampleRequest(s, 40, make_log(n), 20) for n, s in enumerate(CASES)]
    together = apply_processors(logits, picks)
    for n, pick in enumerate(picks):
        assert torch.equal(together[n], apply_processors(logits[n : n + 1], [pick])[0])
    assert torch.equal(logits, before)


@pytest.mark.parametrize("sampling", [s for s in CASES if s.temperature > 0.0])
def test_draws_follow_the_distribution_of_transformers(sampling: Sampling) -> None:
    """A chi-square test; `position` is the counter of the noise, the log stays the same."""
    row, log = make_row(1)[:], make_log(1)
    expected = filtered_by_transformers(row, sampling, log, 20).softmax(-1).double() * DRAWS
    picks = [SampleRequest(sampling, position, log, 20) for position in range(DRAWS)]
    found: list[Sampled] = []
    for start in range(0, DRAWS, 500):
        found += sample(row.expand(500, -1), picks[start : start + 500])
    counts = torch.bincount(torch.tensor([token_of(each) for each in found]), minlength=VOCAB)
    assert counts[expected == 0].sum() == 0
    frequent = expected >= 5
    observed = torch.cat([counts[frequent].double(), counts[~frequent].sum()[None]])
    wanted = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    observed, wanted = observed[wanted > 1], wanted[wanted > 1]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(len(wanted) - 1, 1)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom) + 8  # beyond the 99.9 % point


def token_of(picked: Sampled) -> int:
    assert isinstance(picked, SampledToken)
    return picked.token


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("on_device", [False, True])
def test_row_without_an_allowed_token_samples_none(temperature: float, on_device: bool) -> None:
    logits = torch.stack([make_row(seed) for seed in range(3)])
    fine = Sampling(temperature=temperature, allowed_tokens=(5,))
    stuck = Sampling(temperature=temperature, allowed_tokens=(5,), no_repeat_ngram_size=1, top_k=3)
    picks = [SampleRequest(s, 2, (5, 5), 1) for s in (fine, stuck, fine)]
    found = run(logits, picks, on_device)
    assert found[1] is Unsampled.ALL_MASKED
    assert [token_of(found[0]), token_of(found[2])] == [5, 5]


def run(logits: Tensor, picks: Sequence[SampleRequest], on_device: bool) -> list[Sampled]:
    if on_device:
        return sample_rows_on_device(logits, lambda rows: rows, picks)
    return sample(logits, picks)


@pytest.mark.parametrize("on_device", [False, True])
def test_top_logprobs_are_those_of_the_unchanged_logits(on_device: bool) -> None:
    logits = torch.stack([make_row(seed) for seed in range(3)])
    picks = [
        SampleRequest(Sampling(logprobs=n, logit_bias=((1, 100.0),)), 1, (1,), 1)
        for n in (0, 3, 20)
    ]
    for row, pick, found in zip(logits, picks, run(logits, picks, on_device), strict=True):
        assert isinstance(found, SampledToken)
        expected = torch.log_softmax(row, dim=-1)
        assert found.token == 1
        assert found.logprob == pytest.approx(float(expected[1]), abs=1e-5)
        best = torch.topk(expected, pick.sampling.logprobs)
        assert [each.token for each in found.top] == best.indices.tolist()
        assert [each.logprob for each in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


ids = st.integers(0, VOCAB + 5)
extremes = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, VOCAB, (1 << 31) - 1]),
    top_p=st.sampled_from([0.0, 1e-9, 0.5, 1.0]),
    min_p=st.sampled_from([0.0, 0.5, 1.0]),
    typical_p=st.sampled_from([1e-9, 0.5, 0.999999, 1.0]),
    repetition_penalty=st.sampled_from([1e-3, 1.0, 10.0]),
    presence_penalty=st.sampled_from([-1000.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-1000.0, 0.0, 1000.0]),
    no_repeat_ngram_size=st.integers(0, 50),
    logit_bias=st.lists(st.tuples(ids, st.sampled_from([-1e6, -1.0, 1e6])), max_size=4).map(tuple),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple),
    allowed_tokens=st.lists(ids, max_size=5).map(tuple),
    min_tokens=st.integers(0, 30),
    eos=st.lists(ids, max_size=3).map(tuple),
    logprobs=st.integers(0, 20),
    seed=st.integers(0, (1 << 64) - 1),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(samplings=st.lists(extremes, min_size=1, max_size=3), seed=st.integers(0, 9))
def test_extreme_parameters_sample_only_allowed_tokens(
    samplings: list[Sampling], seed: int
) -> None:
    """Both samplers agree, and a row has no token exactly if no score is left."""
    logits = torch.stack([make_row(seed + n) for n in range(len(samplings))])
    picks = [SampleRequest(s, 40, make_log(seed), 20) for s in samplings]
    scores = apply_processors(logits, picks)
    found = sample(logits, picks)
    for row, each in zip(scores, found, strict=True):
        if bool(row.isneginf().all()):
            assert each is Unsampled.ALL_MASKED
        else:
            assert math.isfinite(float(row[token_of(each)]))
    assert sample_rows_on_device(logits, lambda rows: rows, picks) == found


class _CountedLog(list[int]):
    """A log that counts the entries that are copied out of it."""

    copied = 0

    @override
    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 1
        return found


def test_repeated_ngrams_take_time_for_each_entry_once() -> None:
    """A prompt of one token, and an n-gram of half its length: comparing all places took the tail seconds."""
    unit = [1] * 2000
    log = _CountedLog([*unit, 7, *unit, 8, *unit, 1, 9, *unit])
    assert repeated_ngram_ends(log, len(unit) + 1) == {1, 7, 8, 9}
    assert log.copied < 4 * len(log)


def test_tables_of_running_turns_are_made_once() -> None:
    """The turns of one request with `n`, and more: a table of many allowed tokens takes 20 ms."""
    cache, device = TableCache(), torch.device("cpu")
    turns = [Sampling(allowed_tokens=(place,)) for place in range(200)]
    made = [cache.find(each, VOCAB, device) for each in turns]
    for each, tables in zip(turns, made, strict=True):
        assert cache.find(each, VOCAB, device) is tables
    for _ in range(5 * len(turns)):
        cache.find(turns[0], VOCAB, device)
    assert len(cache) == 1  # the others have ended
