"""Margin of a pick: its distance from another pick, for the oracles of docs/protocol.md ("The same output").

Two computations of the same logits differ by rounding. A pick may then differ too, but only where its margin is of that
size. Used by tests and benchmarks, never while serving; shares every rule with `sampler.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from modelswarm_serving.model.sampling.sampler import apply_penalty, apply_temperature, noise_keys


def margin(logits: Tensor, sampling: Sampling, log: Sequence[int], position: int) -> float:
    """In units of logits [vocab]: moving any two logits apart or together by less than this picks the same token.

    Greedy: the gap between the best two. Sampling: the least of three distances.

    - The gap in the noise race.
    - The distance of the winner from dropping out through a filter.
    - The distance of any token outside from coming in and winning.

    (Top-p is a bound on probability mass; a change of mass is at most half the change of a scaled score.)
    """
    pick = SampleRequest(sampling, position, log)
    scores = apply_penalty(logits.float()[None], [pick])
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
    # one outside must come in and win
    outside = np.maximum(distance, runs[winner] - runs)[~kept].min(initial=np.inf)
    return float(min(_gap(runs[kept]), distance[winner], outside) * sampling.temperature)


def _gap(runs: Floats) -> float:
    """Between the best two; infinite when there is one."""
    if len(runs) < 2:
        return float("inf")
    second, first = np.partition(runs, -2)[-2:]
    return float(first - second)


def _filter_distance(best: Floats, cut: Thresholds, sampling: Sampling, kept: Flags) -> Floats:
    """Per token, in falling order: how much its standing must change before a filter treats it otherwise.

    A kept token drops out through the nearest filter. One outside comes in when all filters that bar it let go.
    """
    inside = np.full(best.shape, np.inf)
    barred = np.zeros(best.shape)
    for distance in _signed_distances(best, cut, sampling):
        inside = np.minimum(inside, np.where(distance >= 0, distance, np.inf))
        barred = np.maximum(barred, np.where(distance < 0, -distance, 0.0))
    chosen: Floats = np.where(kept, inside, barred)
    return chosen


def _signed_distances(best: Floats, cut: Thresholds, sampling: Sampling) -> list[Floats]:
    """Per active filter: positive inside, negative outside."""
    found: list[Floats] = []
    k = sampling.top_k
    if 0 < k < len(best):
        found.append(np.where(best >= best[k - 1], best - best[k], best - best[k - 1]))
    if sampling.top_p < 1.0:
        found.append(sampling.top_p - cut.mass_before[0])
    if sampling.min_p > 0.0:
        found.append(best - cut.min_p[0])
    return found
