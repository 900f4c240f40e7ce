"""The part of `generate` that servers do: transformers' processors as the sampling fields of a request.

transformers has prepared its list of processors, in its order, which is also that of the servers (docs/api.md,
"Sampling"). Each is either a field of the request, or the name of its argument is returned with the reason. All fields
are set, so that none comes from the model's defaults a second time. Knows no sessions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation import logits_process as hf

from modelswarm.client.hf.errors import ArgumentError
from modelswarm.protocol.sampling import MAX_ALLOWED_TOKENS, MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS
from modelswarm.protocol.wire import api_pb2

MAX_TEMPERATURE = 2.0
MAX_BIAS = 100.0
MAX_BAD_SEQUENCES = 512
MAX_REPETITION_PENALTY = 10.0
MAX_STOP_TOKENS = 1024


@dataclass(slots=True)
class ServerSampling:
    """Fields of a request, and what prevents that servers do it."""

    message: api_pb2.Sampling
    reasons: dict[str, str] = field(default_factory=dict)  # argument -> what servers cannot do
    banned: set[int] = field(default_factory=set)  # tokens that are never sampled
    words: set[tuple[int, ...]] = field(
        default_factory=set
    )  # forbidden sequences of several tokens


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts that the servers know of the model themselves."""

    vocabulary: int
    bad_words: frozenset[
        tuple[int, ...]
    ]  # of its generation_config.json; servers always forbid them


def plan_sampling(
    processors: Iterable[Any], facts: ModelFacts, *, do_sample: bool, length: int, eos: list[int]
) -> ServerSampling:
    """Return the fields that do what `processors` do behind inputs of `length` tokens, padding included."""
    message = api_pb2.Sampling(
        temperature=1.0 if do_sample else 0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        typical_p=1.0,
        no_repeat_ngram_size=0,
        min_tokens=0,
        stop_token_ids=eos,
    )
    plan = ServerSampling(message)
    for processor in processors:
        add = _ADDERS.get(type(processor))
        if add is None:
            name = _ARGUMENTS.get(type(processor).__name__, type(processor).__name__)
            plan.reasons[name] = "servers do not have it"
        else:
            add(plan, processor, length)
    _finish(plan, facts)
    return plan


def _finish(plan: ServerSampling, facts: ModelFacts) -> None:
    single = {word[0] for word in facts.bad_words if len(word) == 1}
    several = {word for word in facts.bad_words if len(word) > 1}
    more = sorted(plan.words - several)
    if not (single <= plan.banned and several <= plan.words):
        plan.reasons["bad_words_ids"] = "servers always forbid those of generation_config.json"
    if len(more) > MAX_BAD_SEQUENCES or max(map(len, more), default=0) > MAX_BAD_WORD_TOKENS:
        limit = f"up to {MAX_BAD_SEQUENCES} words of {MAX_BAD_WORD_TOKENS} ids"
        plan.reasons["bad_words_ids"] = f"servers take {limit}"
    else:
        plan.message.bad_words_ids.extend(api_pb2.TokenIds(ids=word) for word in more)
    if len(plan.banned & set(range(facts.vocabulary))) == facts.vocabulary:
        detail = "every token is suppressed, with those of bad_words_ids; allowed: all but one"
        raise ArgumentError("suppress_tokens", detail)
    if plan.banned - single:
        if facts.vocabulary > MAX_ALLOWED_TOKENS:
            detail = f"allowed up to a vocabulary of {MAX_ALLOWED_TOKENS}"
            plan.reasons["suppress_tokens"] = detail
        allowed = [token for token in range(facts.vocabulary) if token not in plan.banned]
        plan.message.allowed_token_ids.extend(allowed)
    if len(plan.message.stop_token_ids) > MAX_STOP_TOKENS:
        plan.reasons["eos_token_id"] = f"servers take up to {MAX_STOP_TOKENS} ids"


def _add_temperature(plan: ServerSampling, processor: Any, length: int) -> None:
    if processor.temperature > MAX_TEMPERATURE:
        plan.reasons["temperature"] = f"servers take up to {MAX_TEMPERATURE:g}"
    plan.message.temperature = processor.temperature


def _add_repetition(plan: ServerSampling, processor: Any, length: int) -> None:
    if processor.penalty > MAX_REPETITION_PENALTY:
        plan.reasons["repetition_penalty"] = f"servers take up to {MAX_REPETITION_PENALTY:g}"
    plan.message.repetition_penalty = processor.penalty


def _add_ngram(plan: ServerSampling, processor: Any, length: int) -> None:
    plan.message.no_repeat_ngram_size = processor.ngram_size


def _add_min_length(plan: ServerSampling, processor: Any, length: int) -> None:
    wanted = max(0, processor.min_length - length)
    plan.message.min_tokens = max(plan.message.min_tokens, wanted)


def _add_min_new(plan: ServerSampling, processor: Any, length: int) -> None:
    wanted = processor.prompt_length_to_skip + processor.min_new_tokens - length
    plan.message.min_tokens = max(plan.message.min_tokens, wanted)


def _add_suppressed(plan: ServerSampling, processor: Any, length: int) -> None:
    plan.banned.update(processor.suppress_tokens.tolist())


def _add_bad_words(plan: ServerSampling, processor: Any, length: int) -> None:
    for word in processor.sequence_bias:
        if len(word) == 1:
            plan.banned.add(word[0])
        else:
            plan.words.add(tuple(word))


def _add_bias(plan: ServerSampling, processor: Any, length: int) -> None:
    biases: dict[tuple[int, ...], float] = processor.sequence_bias
    if any(len(sequence) > 1 for sequence in biases):
        plan.reasons["sequence_bias"] = "servers bias single ids, not sequences of several"
    elif len(biases) > MAX_LOGIT_BIAS or any(abs(bias) > MAX_BIAS for bias in biases.values()):
        limit = f"{MAX_LOGIT_BIAS} ids, each from -{MAX_BIAS:g} to {MAX_BIAS:g}"
        plan.reasons["sequence_bias"] = f"servers take up to {limit}"
    else:
        for (token,), bias in biases.items():
            plan.message.logit_bias[token] = bias


def _add_top_k(plan: ServerSampling, processor: Any, length: int) -> None:
    plan.message.top_k = processor.top_k


def _add_top_p(plan: ServerSampling, processor: Any, length: int) -> None:
    if not processor.top_p:
        plan.reasons["top_p"] = "servers take values above 0"
    plan.message.top_p = processor.top_p


def _add_min_p(plan: ServerSampling, processor: Any, length: int) -> None:
    plan.message.min_p = processor.min_p


def _add_typical(plan: ServerSampling, processor: Any, length: int) -> None:
    plan.message.typical_p = processor.mass


def _add_nothing(plan: ServerSampling, processor: Any, length: int) -> None:
    """Normalized scores draw the same tokens."""


_ADDERS: dict[type, Callable[[ServerSampling, Any, int], None]] = {
    hf.TemperatureLogitsWarper: _add_temperature,
    hf.RepetitionPenaltyLogitsProcessor: _add_repetition,
    hf.NoRepeatNGramLogitsProcessor: _add_ngram,
    hf.MinLengthLogitsProcessor: _add_min_length,
    hf.MinNewTokensLengthLogitsProcessor: _add_min_new,
    hf.SuppressTokensLogitsProcessor: _add_suppressed,
    hf.NoBadWordsLogitsProcessor: _add_bad_words,
    hf.SequenceBiasLogitsProcessor: _add_bias,
    hf.TopKLogitsWarper: _add_top_k,
    hf.TopPLogitsWarper: _add_top_p,
    hf.MinPLogitsWarper: _add_min_p,
    hf.TypicalLogitsWarper: _add_typical,
    hf.LogitNormalization: _add_nothing,
}
_ARGUMENTS = {
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "TopHLogitsWarper": "top_h",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "WatermarkLogitsProcessor": "watermarking_config",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
}
"""Processors of transformers that need the logits -> the argument of `generate` that asks for them."""


def seeded(plan: ServerSampling, count: int) -> list[api_pb2.Sampling]:
    """Return the fields for each row, with seeds of torch's generator: `torch.manual_seed` decides the answers."""
    samplings = []
    is_drawn = plan.message.temperature > 0
    seeds = torch.randint(0, (1 << 63) - 1, (count,)).tolist() if is_drawn else [0] * count
    for seed in seeds:
        sampling = api_pb2.Sampling()
        sampling.CopyFrom(plan.message)
        sampling.seed = seed
        samplings.append(sampling)
    return samplings
