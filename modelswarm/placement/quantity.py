"""Amounts of memory as people write them: `512Mi`, `2G`, `1048576`.

Used by placement for pool limits and by the command line for `--memory`; shown back by `mebibytes`.
"""

from __future__ import annotations

import re

from modelswarm.errors import UserError

_FACTORS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "P": 10**15,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
    "Pi": 2**50,
}
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)(|[kKMGTP]|[KMGTP]i)$", re.ASCII)


def bytes_of(quantity: str | int, field: str) -> int:
    """Bytes of a Kubernetes quantity. `field` is what an error calls it."""
    match = _QUANTITY.match(str(quantity).strip())
    if match is None or (size := int(float(match.group(1)) * _FACTORS[match.group(2)])) <= 0:
        raise UserError(
            field, f"{quantity!r} is not an amount of memory; allowed: e.g. 512Mi or 2Gi"
        )
    return size


def human_bytes(size: int) -> str:
    """Three significant digits and a binary unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
