"""Input logs as plain sequences of entries. Used wherever two logs of a session or of its forks are compared."""

from __future__ import annotations

from collections.abc import Sequence

_AT_ONCE = 1024
"""Entries that are compared at once, without a step of Python for each: event loops compare whole logs."""


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal entries at the beginning of both."""
    shorter, at = min(len(one), len(other)), 0
    while at < shorter:
        some, others = tuple(one[at : at + _AT_ONCE]), tuple(other[at : at + _AT_ONCE])
        if some != others:
            pairs = enumerate(zip(some, others, strict=False), at)
            return next((place for place, (a, b) in pairs if a != b), shorter)
        at += _AT_ONCE
    return shorter
