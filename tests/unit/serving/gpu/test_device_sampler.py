"""The sampler of accelerators draws the tokens of the sampler of the CPU."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support.models.sampling.sampling_cases import LOG, SAMPLINGS, VOCAB
from support.models.sampling.waiting_device import DeviceTensor, WaitingDevice
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from modelswarm.placement.memory import LOGIT_ROWS, SAMPLE_BYTES_PER_LOGIT
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import BatchItem, ModelShape, SampleRequest
from modelswarm_serving.model.sampling import sampler
from modelswarm_serving.model.sampling.device_sampler import (
    gumbel,
    sample_rows_on_device,
    sample_tokens,
)
from modelswarm_serving.model.sampling.noise import draw_key
from modelswarm_serving.model.sampling.noise import gumbel as gumbel_of_the_cpu
from modelswarm_serving.model.sampling.prompt_scores import read_scores, score_tokens
from modelswarm_serving.model.sampling.sampler import Unsampled, sample
from modelswarm_serving.model.transformer.device_pages import largest_step


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name, and the most bytes of tensors that exist at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.peak = 0
        self._sizes: dict[int, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.calls[func.name()] += 1
        for tensor in tree_leaves(made):
            storage = tensor.untyped_storage() if isinstance(tensor, torch.Tensor) else None
            if storage is not None and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._sizes.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._sizes.values()))
        return made


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


def test_greedy_rows_of_a_large_vocabulary_are_one_part() -> None:
    """A part has some 20 launches, which the host pays for."""
    picks = [SampleRequest(Sampling(), 5, LOG, begin=2) for _ in range(LOGIT_ROWS)]
    logits = torch.randn(LOGIT_ROWS, 128_256)
    with Operations() as operations:
        found = sample_rows_on_device(logits, lambda rows: rows, picks)
    assert operations.calls["aten::max.dim"] == 1
    assert found == sample(logits, picks)


def test_host_waits_once_for_the_tokens_of_a_step() -> None:
    every, cases = make_case(3)
    samplings = [pick.sampling for pick in cases]
    decided = [n for n, s in enumerate(samplings) if s.top_k < 256 and s.typical_p == 1.0]
    logits, picks = every[decided] * 8, [cases[n] for n in decided]  # by their best scores
    with WaitingDevice() as device:
        found = sample_rows_on_device(DeviceTensor(logits), lambda rows: rows, picks)
    assert device.waits == ["aten::copy_"]
    assert found == sample(logits, picks)


def test_host_waits_once_for_the_scores_of_a_step() -> None:
    logits = [torch.randn(rows, VOCAB) for rows in (5, 3)]
    targets = [[3, 0, 39, 7, 7], [1, 2, 3]]
    with WaitingDevice() as device:
        tables = [
            score_tokens(DeviceTensor(each), wanted, top)
            for each, wanted, top in zip(logits, targets, (2, 0), strict=True)
        ]
        found = read_scores(tables, targets)
    assert device.waits == ["aten::copy_"]
    assert found == read_scores(list(map(score_tokens, logits, targets, (2, 0))), targets)
    assert [len(score.top) for scores in found for score in scores] == [2] * 5 + [0] * 3


def test_measured_step_has_the_largest_tables() -> None:
    """Else a step could need more than was measured at the start."""

    def bytes_per_logit(sampling: Sampling) -> float:
        picks = [SampleRequest(sampling, 9, LOG, begin=2) for _ in range(4)]
        logits = torch.randn(4, 20_000)
        with Operations() as operations:
            sample_tokens(logits, picks, sampling.logprobs, whole=False)
        return float(operations.peak / logits.numel())

    shape = ModelShape(0, 4, 4, 64, page_size=4, total_pages=16, max_length=64, vocab_size=9)
    measured = largest_step(shape, 32)[0]
    assert isinstance(measured, BatchItem) and measured.sample is not None
    most = bytes_per_logit(measured.sample.sampling)
    assert max(map(bytes_per_logit, SAMPLINGS)) <= most + 0.5 <= SAMPLE_BYTES_PER_LOGIT
