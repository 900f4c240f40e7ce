"""Margin of a pick: its distance from another pick, for the oracles of docs/protocol.md ("The same output").

Two computations of the same logits differ by rounding. A pick may then differ too, but only where its margin is of that
size. Used by tests and benchmarks, never while serving. Its rules are those of `sampler.py`, by import.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import SampleRequest
from modelswarm_serving.model.sampling.filters import (
    Flags,
    Thresholds,
    find_thresholds,
    is_filtered,
)
from modelswarm_serving.model.sampling.noise import Floats, gumbel
from modelswarm_serving.model.sampling.processors import apply_processors
from modelswarm_serving.model.sampling.sampler import apply_temperature, noise_keys


def margin(logits: Tensor, pick: SampleRequest) -> float:
    """Return the margin in units of logits [vocab]: moving any two logits by less than this picks the same token.

    Greedy: the gap between the best two. Sampling: the least of three distances.

    - The gap in the noise race.
    - The distance at which a filter removes the winner.
    - The distance at which a filtered token is kept, and wins.

    (Top-p is a bound on probability mass; a change of mass is at most half the change of a scaled score.)
    """
    sampling = pick.sampling
    if sampling.typical_p < 1.0:
        raise ValueError("typical_p: no margin is known, since it also orders tokens by entropy")
    scores = apply_processors(logits.float()[None], [pick])
    if sampling.temperature == 0.0:
        first, second = torch.topk(scores[0], 2).values.tolist()
        return float(first - second)
    best_scores, ids = torch.sort(apply_temperature(scores, [sampling]), descending=True)
    best = best_scores.cpu().numpy()
    runs = (best + gumbel(noise_keys([pick]), ids.cpu().numpy()))[0]
    if not is_filtered(sampling):
        return float(_gap(runs) * sampling.temperature)
    total = torch.logsumexp(best_scores, dim=-1).cpu().numpy()
    cut = find_thresholds(best, total, [sampling])
    kept = best[0] >= cut.min_score[0]
    winner = int(np.where(kept, runs, -np.inf).argmax())
    distance = _filter_distance(best[0], cut, sampling, kept)
    # a filtered token must be kept and must win
    outside = np.maximum(distance, runs[winner] - runs)[~kept].min(initial=np.inf)
    return float(min(_gap(runs[kept]), distance[winner], outside) * sampling.temperature)


def _gap(runs: Floats) -> float:
    """Return the gap between the best two; infinite for one."""
    if len(runs) < 2:
        return float("inf")
    second, first = np.partition(runs, -2)[-2:]
    return float(first - second)


def _filter_distance(best: Floats, cut: Thresholds, sampling: Sampling, kept: Flags) -> Floats:
    """Return per token, in falling order, the change of score after which a filter treats it differently.

    A kept token is removed by the nearest filter. A filtered token is kept when all filters keep it.
    """
    inside = np.full(best.shape, np.inf)
    barred = np.zeros(best.shape)
    for distance in _signed_distances(best, cut, sampling):
        inside = np.minimum(inside, np.where(distance >= 0, distance, np.inf))
        barred = np.maximum(barred, np.where(distance < 0, -distance, 0.0))
    chosen: Floats = np.where(kept, inside, barred)
    return chosen


def _signed_distances(best: Floats, cut: Thresholds, sampling: Sampling) -> list[Floats]:
    """Return the distance from each active filter: positive if kept, negative if removed."""
    found: list[Floats] = []
    k = sampling.top_k
    if 0 < k < len(best):
        found.append(np.where(best >= best[k - 1], best - best[k], best - best[k - 1]))
    if sampling.top_p < 1.0:
        found.append(sampling.top_p - cut.mass_before[0])
    if sampling.min_p > 0.0:
        found.append(best - cut.min_p[0])
    return found
