"""Features of this machine's CPU that decide about the number format of weights.

Used by the local runtime for `dtype: auto`. Reads `/proc/cpuinfo` below a root folder; other systems show no features.
"""

from __future__ import annotations

import re
from pathlib import Path

from modelswarm.process.control_groups import ROOT, read_text

_FEATURES = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # of x86, x86, aarch64


def has_fast_bfloat16(root: Path = ROOT) -> bool:
    """Return True if every CPU multiplies bfloat16 in hardware.

    Without, products of bfloat16 took twice as long as those of float32 (AVX2, one thread).
    """
    cpus = _FEATURES.findall(read_text(root / "proc/cpuinfo") or "")
    return bool(cpus) and all(_BFLOAT16 & set(features.split()) for features in cpus)
