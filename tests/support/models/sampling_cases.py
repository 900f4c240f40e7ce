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
)
