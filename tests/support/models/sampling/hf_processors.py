"""The scores that transformers' own processors give for the parameters of a request, in the order of its `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from modelswarm.protocol.messages import Sampling


class _CountPenalties:
    """Frequency and presence penalty, which transformers lacks: vLLM's `apply_penalties`, token by token."""

    def __init__(self, sampling: Sampling, begin: int) -> None:
        self._sampling, self._begin = sampling, begin

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        generated = input_ids[0, self._begin :].tolist()
        for token in set(generated):
            scores[0, token] -= self._sampling.frequency_penalty * generated.count(token)
            scores[0, token] -= self._sampling.presence_penalty
        return scores


def processed_by_transformers(
    row: Tensor, sampling: Sampling, log: Sequence[int], begin: int
) -> Tensor:
    """Return the scores [vocab] of one row before temperature and filters."""
    steps: Any = LogitsProcessorList()
    if sampling.logit_bias:
        biases: Any = {(t,): bias for t, bias in sampling.logit_bias}
        steps.append(SequenceBiasLogitsProcessor(biases))
    if sampling.repetition_penalty != 1.0:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    steps.append(_CountPenalties(sampling, begin))
    if sampling.no_repeat_ngram_size:
        steps.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.bad_words:
        steps.append(NoBadWordsLogitsProcessor([list(word) for word in sampling.bad_words]))
    if sampling.min_tokens and sampling.eos:
        steps.append(
            MinNewTokensLengthLogitsProcessor(begin, sampling.min_tokens, list(sampling.eos))
        )
    if sampling.allowed_tokens:
        others = sorted(set(range(len(row))) - set(sampling.allowed_tokens))
        steps.append(SuppressTokensLogitsProcessor(others))
    scores: Tensor = steps(torch.tensor([list(log)]), row[None].clone())
    return scores[0]


def filtered_by_transformers(
    row: Tensor, sampling: Sampling, log: Sequence[int], begin: int
) -> Tensor:
    """Return the scores [vocab] of one row after all processors and filters."""
    steps: Any = LogitsProcessorList()
    if sampling.temperature not in (0.0, 1.0):
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        steps.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1.0:
        steps.append(TypicalLogitsWarper(sampling.typical_p))
    scores: Tensor = steps(None, processed_by_transformers(row, sampling, log, begin)[None])
    return scores[0]
