"""Input logs as plain sequences of entries. Used wherever two logs of a session or of its forks are compared."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal entries at the beginning of both."""
    for length, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return length
    return min(len(one), len(other))
