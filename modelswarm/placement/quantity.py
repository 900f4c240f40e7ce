"""Amounts of memory as users write them (`512Mi`, `2G`, `1048576`), and as messages show them.

Used by placement for pool limits and by command lines for `--memory`. Knows no documents.
"""

from __future__ import annotations

import re

from modelswarm.errors import UserError
from modelswarm.resources.rules import parse_quantity

_QUANTITY = re.compile(r"\d+(\.\d+)?([kKMGTP]|[KMGTP]i)?", re.ASCII)


def bytes_of(quantity: str | int, field: str) -> int:
    """Return the bytes of a Kubernetes quantity, at least 1. Errors name `field`."""
    text = str(quantity).strip()
    if _QUANTITY.fullmatch(text) is None or (size := int(parse_quantity(text))) <= 0:
        raise UserError(
            field, f"{quantity!r} is not an amount of memory; allowed: e.g. 512Mi or 2Gi"
        )
    return size


def human_bytes(size: int) -> str:
    """Return `size` with three significant digits and a binary unit."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
