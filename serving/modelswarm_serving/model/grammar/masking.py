"""Puts the masks of grammars on scores. Used by both samplers, on the CPU and on an accelerator."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modelswarm_serving.model.attention.staging import to_device, to_index
from modelswarm_serving.model.base import SampleRequest


def apply_masks(scores: Tensor, picks: Sequence[SampleRequest]) -> Tensor:
    """Return the scores with -inf for tokens outside a row's mask; the input itself if no row has one."""
    rows = [row for row, pick in enumerate(picks) if pick.mask is not None]
    if not rows:
        return scores
    vocab = scores.shape[1]
    bits = np.stack([np.frombuffer(mask, np.uint8) for pick in picks if (mask := pick.mask)])
    allowed = np.unpackbits(bits, axis=1, count=vocab, bitorder="little").view(np.bool_)
    masks = to_device(torch.from_numpy(allowed), scores.device)
    index = to_index(rows, scores.device)
    return scores.index_copy(0, index, scores[index].masked_fill(~masks, -math.inf))
