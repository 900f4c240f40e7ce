"""Samplings that differ in every filter, and the log before them, for the tests of both samplers."""

from __future__ import annotations

from modelswarm.protocol.messages import Sampling

VOCAB = 500
LOG = [3, 7, 7, 41, 0, 499]
SAMPLINGS = (
    Sampling(),
    Sampling(repetition_penalty=1.7),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, top_k=5, seed=5),
    Sampling(temperature=1.3, top_p=0.8, seed=6),
    Sampling(temperature=0.9, top_k=40, top_p=0.5, seed=7),
    Sampling(temperature=1.1, min_p=0.05, seed=8),
    Sampling(temperature=1.5, top_k=300, top_p=0.95, min_p=0.01, seed=9, choice=2),
    Sampling(temperature=0.8, top_k=50, repetition_penalty=1.3, seed=(1 << 64) - 1),
    Sampling(temperature=3.0, top_p=0.999, seed=1),
    Sampling(temperature=1.0, top_k=10_000, top_p=0.9, seed=1),
    Sampling(temperature=1.0, top_p=0.0, seed=1),
    Sampling(logit_bias=((5, 3.0), (499, -2.0), (7, 1.5)), repetition_penalty=1.2),
    Sampling(temperature=0.9, presence_penalty=1.5, frequency_penalty=-0.7, top_k=60, seed=2),
    Sampling(temperature=1.2, no_repeat_ngram_size=2, bad_words=((9,), (499, 11), (0, 499, 12)), seed=3),
    Sampling(temperature=2.0, allowed_tokens=(4, 8, 15, 16, 23, 42, 499), top_p=0.9, seed=4),
    Sampling(temperature=1.5, min_tokens=9, eos=(1, 2, 3), no_repeat_ngram_size=1, seed=5),
    Sampling(temperature=1.4, typical_p=0.7, seed=6),
    Sampling(temperature=1.8, typical_p=0.4, top_k=80, min_p=0.001, seed=7, logprobs=3),
    Sampling(
        temperature=1.1, top_k=200, top_p=0.97, min_p=0.001, typical_p=0.9, repetition_penalty=1.1,
        presence_penalty=0.3, frequency_penalty=0.2, no_repeat_ngram_size=3, logit_bias=((5, 2.0),),
        bad_words=((9,), (499, 11)), min_tokens=20, eos=(1, 2), allowed_tokens=tuple(range(400)),
        logprobs=20, seed=8,
    ),
)  # fmt: skip
BEGIN = 2
"""Log length at the begin of the turn."""
