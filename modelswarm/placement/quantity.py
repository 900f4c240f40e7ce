"""Amounts of memory as users write them (`512Mi`, `2G`, `1048576`), and as messages show them.

Used by placement for pool limits and by command lines for `--memory`. Knows no documents.
"""

from __future__ import annotations

import re

from modelswarm.errors import UserError
from modelswarm.resources.rules import parse_quantity

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MI = 1 << 20
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
    """Return `size` with three significant digits, four from 1000 on, and a binary unit."""
    value, unit = float(size), 0
    while unit < len(_UNITS) - 1 and float(_digits(value)) >= 1024:
        value, unit = value / 1024, unit + 1
    return f"{_digits(value)} {_UNITS[unit]}"


def human_share(done: int, total: int) -> str:
    """Return both in the unit of `total`, such as `3.1 of 8.2 GiB`."""
    value, unit = float(total), 0
    while unit < len(_UNITS) - 1 and float(_digits(value)) >= 1024:
        value, unit = value / 1024, unit + 1
    share = done / 1024**unit
    if unit == 0:
        return f"{done} of {total} {_UNITS[unit]}"
    return f"{share:.1f} of {value:.1f} {_UNITS[unit]}"


def limit_at_least(size: int) -> str:
    """Return the smallest whole number of Mi that is not below `size`, as documents write it: `742Mi`."""
    return f"{-(-size // _MI)}Mi"


def quantity_of(size: int) -> str:
    """Return `size` as a Kubernetes quantity, rounded up: whole Mi, or whole Ki below 10 Mi."""
    return f"{-(-size >> 10)}Ki" if size < 10 * _MI else limit_at_least(size)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 999.5 else f"{value:.3g}"
