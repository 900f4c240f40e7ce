"""Top-k, top-p and min-p as one threshold per row, and typical-p among the tokens that reach it.

The order is that of transformers' generate (see `processors.py`). So is each rule, except that equal scores at a
threshold stay together. Computed on the best K scores of each row. The outcome does not depend on K, or `is_decided`
reports that K was too small. Used by `sampler.py` and by tests; knows no logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.sampling.noise import Floats

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of S rows, in scaled scores (after temperature); -inf where a filter is off."""

    top_k: Floats  # the k-th best score
    mass_before: Floats  # [S, K]: probability of all higher ranks, after top-k
    top_p: Floats
    min_p: Floats

    @property
    def min_score(self) -> Floats:
        """Lowest score that stays."""
        lowest: Floats = np.maximum(np.maximum(self.top_k, self.top_p), self.min_p)
        return lowest


def is_filtered(sampling: Sampling) -> bool:
    return (
        sampling.top_k > 0
        or sampling.top_p < 1.0
        or sampling.min_p > 0.0
        or sampling.typical_p < 1.0
    )


def find_thresholds(best: Floats, log_total: Floats, samplings: Sequence[Sampling]) -> Thresholds:
    """Return the thresholds. `best` [S, K]: falling scaled scores; `log_total` [S]: logsumexp of whole rows."""
    width = best.shape[1]
    k = np.array([s.top_k if 0 < s.top_k <= width else 0 for s in samplings])
    p = np.array([s.top_p for s in samplings])
    min_p = np.array([s.min_p for s in samplings])
    rows = np.arange(len(samplings))
    kth = np.where(k > 0, best[rows, np.maximum(k, 1) - 1], -np.inf)
    with np.errstate(divide="ignore"):
        relative = best[:, 0] + np.log(min_p)
    mass = np.where(best >= kth[:, None], np.exp(best - best[:, :1]), 0.0)
    sums = np.cumsum(mass, axis=1)  # left to right, so that more columns change nothing
    total = np.where(k > 0, sums[:, -1], np.exp(log_total - best[:, 0]))
    before = (sums - mass) / total[:, None]
    in_nucleus = (before < p[:, None]) & (mass > 0.0)
    in_nucleus[:, 0] = True  # one token always stays
    smallest = np.where(in_nucleus, best, np.inf).min(axis=1)
    return Thresholds(kth, before, np.where(p < 1.0, smallest, -np.inf), relative)


def is_decided(
    thresholds: Thresholds, best: Floats, samplings: Sequence[Sampling], vocab: int
) -> Flags:
    """Return for each row whether its K best scores decide it: no other score can reach the threshold."""
    width = best.shape[1]
    if width == vocab:
        return np.ones(len(samplings), dtype=np.bool_)
    wide_enough = np.array([s.top_k < width for s in samplings])
    flags: Flags = wide_enough & (thresholds.min_score > best[:, -1])
    return flags | np.isneginf(best[:, -1])  # no other token is allowed


def keep_typical(kept: Floats, samplings: Sequence[Sampling]) -> Floats:
    """Apply typical-p (transformers' `TypicalLogitsWarper`) to `kept` [S, K]: falling scores, -inf where removed.

    The tokens whose information is nearest to the entropy stay, until their mass reaches typical_p.
    """
    rows = [row for row, sampling in enumerate(samplings) if sampling.typical_p < 1.0]
    if not rows:
        return kept
    some = kept[rows]
    limit = np.array([samplings[row].typical_p for row in rows])[:, None]
    relative = some - some[:, :1]
    mass = np.exp(relative)
    log_mass = relative - np.log(np.cumsum(mass, axis=1)[:, -1:])  # left to right, as in top-p
    mass = np.exp(log_mass)
    information = np.where(mass > 0.0, -log_mass, 0.0)
    entropy = np.cumsum(mass * information, axis=1)[:, -1:]
    distance = np.abs(-log_mass - entropy)
    order = np.argsort(distance, axis=1, kind="stable")
    sums = np.cumsum(np.take_along_axis(mass, order, axis=1), axis=1)
    last = np.minimum((sums < limit).sum(axis=1, keepdims=True), some.shape[1] - 1)
    farthest = np.take_along_axis(np.take_along_axis(distance, order, axis=1), last, axis=1)
    result = kept.copy()
    result[rows] = np.where(distance <= farthest, some, -np.inf)
    return result
