"""The names of the layouts of a weight matrix. Does not import torch, as `settings.py` must not."""

from __future__ import annotations

from enum import StrEnum


class WeightLayout(StrEnum):
    TRANSPOSED = "transposed"  # [in, out]
    PLAIN = "plain"  # [out, in], as in checkpoints
    PACKED = "packed"  # oneDNN's blocks


OWN_MODULES = "modules"
"""In a numerics class: transformers' own modules have the weights, and multiply by torch's Linear."""
AUTO = "auto"
CHOICES = (AUTO, *(each.value for each in WeightLayout))
"""Values of `--weight-layout`; auto: as measured at start."""
