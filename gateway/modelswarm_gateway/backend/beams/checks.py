"""Checks that a beam search can give a request's answers: what changes scores, and how many tokens are reported."""

from __future__ import annotations

from modelswarm.protocol.messages import MAX_LOGPROBS, Sampling
from modelswarm_gateway.backend.beams.options import BeamOptions
from modelswarm_gateway.backend.beams.scorer import tokens_per_beam
from modelswarm_gateway.errors import invalid_field

# Fields of the sampling that change scores -> the name of the request's field, and the value that changes none.
_NEUTRAL = {
    "repetition_penalty": ("repetition_penalty", 1.0),
    "presence_penalty": ("presence_penalty", 0.0),
    "frequency_penalty": ("frequency_penalty", 0.0),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", 0),
    "min_tokens": ("min_tokens", 0),
    "logit_bias": ("logit_bias", ()),
    "bad_words": ("bad_words", ()),
    "allowed_tokens": ("allowed_token_ids", ()),
}


def check_beams(options: BeamOptions, sampling: Sampling) -> None:
    """Raise ApiError if the request, or the model's generation_config.json, asks for what beams cannot have."""
    for name, (field, neutral) in _NEUTRAL.items():
        if getattr(sampling, name) != neutral:
            detail = (
                "a beam search compares the model's own log probabilities, which it would change; "
                f"send {_sent(neutral)}, also if the model's generation_config.json sets it"
            )
            raise invalid_field(field, detail)
    count = tokens_per_beam(options, sampling.eos)
    if count > MAX_LOGPROBS:
        allowed = MAX_LOGPROBS - len(sampling.eos)
        detail = (
            f"with {len(sampling.eos)} end tokens at most {allowed} beams, not {options.num_beams}"
        )
        raise invalid_field("num_beams", detail)


def _sent(neutral: object) -> str:
    return "nothing" if neutral == () else f"{neutral:g}"
