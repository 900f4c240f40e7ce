"""Features of this machine's CPU that decide about the number format of weights, and about the bits of results.

Used by the local runtime for `dtype: auto`, and by servers for their numerics class. Reads `/proc/cpuinfo` below a root
folder; other systems show no features.
"""

from __future__ import annotations

import re
from pathlib import Path

from modelswarm.process.control_groups import ROOT, read_text

_FEATURES = re.compile(r"^(?:flags|Features)\s*:(.*)$", re.MULTILINE)
_VENDOR = re.compile(r"^(?:vendor_id|CPU implementer)\s*:\s*(\S+)", re.MULTILINE)
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel"}
_BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})  # of x86, x86, aarch64
# Extensions for which torch, oneDNN and MKL have kernels of their own; the first that a CPU has names its kernels.
_EXTENSIONS = (
    *("amx_fp16", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512_vnni", "avx512bw"),
    *("avx_vnni", "avx2", "avx", "sve2", "sve", "bf16", "asimd"),
)


def has_fast_bfloat16(root: Path = ROOT) -> bool:
    """Return True if every CPU multiplies bfloat16 in hardware.

    Without, products of bfloat16 took twice as long as those of float32 (AVX2, one thread).
    """
    cpus = _features(root)
    return bool(cpus) and all(_BFLOAT16 & features for features in cpus)


def cpu_kernels(root: Path = ROOT) -> str:
    """Return a name for the kernels that libraries take on this CPU, such as `amd-avx512_bf16`; empty: unknown.

    MKL chooses by vendor, too. An extension counts if every CPU has it.
    """
    cpus = _features(root)
    vendor = _VENDOR.search(read_text(root / "proc/cpuinfo") or "")
    widest = next((each for each in _EXTENSIONS if all(each in cpu for cpu in cpus)), "")
    if not cpus or vendor is None or not widest:
        return ""
    return f"{_VENDORS.get(vendor[1], vendor[1])}-{widest}"


def _features(root: Path) -> list[set[str]]:
    """Return the features of each CPU."""
    return [set(each.split()) for each in _FEATURES.findall(read_text(root / "proc/cpuinfo") or "")]
