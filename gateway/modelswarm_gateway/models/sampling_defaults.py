"""Sampling defaults: the model's generation_config.json, overridden by the request.

    field                model's file                                  default
    temperature          if do_sample is true                          1 if do_sample is true, else 0 (greedy)
    top_p, top_k, min_p  if do_sample is true                          off
    typical_p            if do_sample is true                          off
    repetition_penalty   always                                        1 (off)
    no_repeat_ngram_size always                                        off
    min_tokens           min_new_tokens                                0
    bad words            bad_words_ids and suppress_tokens             none
    max_tokens           max_new_tokens                                16 for text, to the context's end for chat
    eos                  eos_token_id, and the tokenizer's eos_token   config.json's eos_token_id
    seed                 never                                         random for every request

A field that the request sets overrides the file; the other fields still come from the file. The request's bad words and
stop_token_ids add to the file's; `ignore_eos` empties eos but for stop_token_ids, as in vLLM. Fields of the file that
are not obeyed are named in `ignored`.
Pure; used by `tokenizer.py` (parsing) and the service (merging).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from modelswarm.checkpoint.generation_config import (
    MAX_MODEL_BAD_WORDS,
    end_tokens,
    ignored_fields,
    model_bad_words,
)
from modelswarm.protocol.messages import Sampling

SEED_RANGE = 1 << 64
# Larger than any vocabulary; a link carries no larger numbers.
MAX_TOP_K = (1 << 31) - 1
# Below it the best token always wins, and scores divided by it would overflow.
MIN_TEMPERATURE = 1e-6
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e6
MIN_TYPICAL_P = 1e-9
MAX_COUNT = (1 << 31) - 1
# Most end tokens of a model. Each turn carries them to its servers, and keeps them; known models have at most ten.
MAX_END_TOKENS = 1024
_HUGE = 1e300
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling fields of a request; None: not set."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_tokens: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[str, ...] = ()
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; None: no report
    logprobs: int | None = None  # top alternatives to report with a token; None: no report


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling defaults from the model's files, complete."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    typical_p: float = 1.0
    no_repeat_ngram_size: int = 0
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    ignored: tuple[str, ...] = ()  # fields of generation_config.json that are not obeyed
    max_tokens: int | None = None
    eos: tuple[int, ...] = ()

    def sampling(self, options: SamplingOptions, random_seed: int) -> Sampling:
        seed = random_seed if options.seed is None else options.seed
        temperature = _first(options.temperature, self.temperature)
        penalty = _first(options.repetition_penalty, self.repetition_penalty)
        eos = () if options.ignore_eos else self.eos
        return Sampling(
            temperature=temperature if temperature >= MIN_TEMPERATURE else 0.0,
            top_k=min(max(0, _first(options.top_k, self.top_k)), MAX_TOP_K),
            top_p=_limited(_first(options.top_p, self.top_p), 0.0),
            min_p=_limited(_first(options.min_p, self.min_p), 0.0),
            repetition_penalty=min(max(penalty, MIN_REPETITION_PENALTY), MAX_REPETITION_PENALTY),
            seed=seed % SEED_RANGE,
            eos=tuple(dict.fromkeys((*eos, *options.stop_token_ids))),
            typical_p=_limited(_first(options.typical_p, self.typical_p), MIN_TYPICAL_P),
            presence_penalty=options.presence_penalty or 0.0,
            frequency_penalty=options.frequency_penalty or 0.0,
            no_repeat_ngram_size=min(
                _first(options.no_repeat_ngram_size, self.no_repeat_ngram_size), MAX_COUNT
            ),
            logit_bias=options.logit_bias,
            bad_words=self.bad_words,
            min_tokens=min(_first(options.min_tokens, self.min_tokens), MAX_COUNT),
            allowed_tokens=tuple(dict.fromkeys(options.allowed_token_ids)),
            logprobs=options.logprobs or 0,
            prompt_logprobs=-1 if options.prompt_logprobs is None else options.prompt_logprobs,
        )


def read_defaults(
    generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer_eos: int | None
) -> SamplingDefaults:
    """Return the defaults in generation_config.json and config.json (each may be empty)."""
    samples = generation.get("do_sample") is True
    asked = generation if samples else {}
    ids = end_tokens(generation, config)
    own = () if tokenizer_eos is None else (tokenizer_eos,)
    longest = generation.get("max_new_tokens")
    bad_words = model_bad_words(generation, set(ids))
    return SamplingDefaults(
        temperature=_number(asked, "temperature", 1.0 if samples else 0.0),
        top_p=_number(asked, "top_p", 1.0),
        top_k=_whole(asked, "top_k"),
        min_p=_number(asked, "min_p", 0.0),
        repetition_penalty=_number(generation, "repetition_penalty", 1.0),
        typical_p=_number(asked, "typical_p", 1.0),
        no_repeat_ngram_size=_whole(generation, "no_repeat_ngram_size"),
        min_tokens=_whole(generation, "min_new_tokens"),
        bad_words=() if len(bad_words) > MAX_MODEL_BAD_WORDS else bad_words,
        ignored=ignored_fields(generation, len(bad_words)),
        max_tokens=longest if isinstance(longest, int) and longest > 0 else None,
        eos=tuple(dict.fromkeys(ids + own)),
    )


def _first(given: T | None, default: T) -> T:
    return default if given is None else given


def _limited(value: float, low: float) -> float:
    """Return the value within the limits of the wire: a file may have any number."""
    return min(max(value, low), 1.0)


def _number(source: Mapping[str, Any], name: str, default: float) -> float:
    """Return the field as float. Python's JSON also has NaN, Infinity and huge integers: those give the default."""
    value = source.get(name)
    if not isinstance(value, int | float) or not abs(value) < _HUGE:
        return default
    return float(value)


def _whole(source: Mapping[str, Any], name: str) -> int:
    return max(0, int(_number(source, name, 0)))
