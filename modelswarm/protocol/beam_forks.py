"""Chooses the session of each reordered beam: one is rewound or forked, with the least rows to compute again.

Used by the gateway's beam search and by the Hugging Face classes. Pure: logs in, places of sessions out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from modelswarm.protocol.input_log import common_prefix_length

Log: TypeAlias = "tuple[int, ...]"

FORK_TOKENS = 128
"""Tokens that a fork must save over rewinding a session: it costs several round trips, and a step takes many rows."""


@dataclass(frozen=True, slots=True)
class Source:
    """The beginning of one log."""

    session: int | None = (
        None  # place of the session that may be rewound for it; None: all are taken
    )
    parent: int | None = None  # place of the session that is forked; None: none is
    position: int = 0  # entries that the fork has


def choose_sources(sessions: Sequence[Log], logs: Sequence[Log]) -> list[Source]:
    """Return the source of each of `logs`. No session is rewound for two logs; any number may be forked from it."""
    common = _common_lengths(sessions, logs)
    pairs = sorted(
        ((-length, at, place) for at, row in enumerate(common) for place, length in enumerate(row))
    )
    own: dict[int, int] = {}
    taken: set[int] = set()
    for _, at, place in pairs:
        if at not in own and place not in taken:
            own[at] = place
            taken.add(place)
    return [_choose(own.get(at), common[at], len(log)) for at, log in enumerate(logs)]


def _common_lengths(sessions: Sequence[Log], logs: Sequence[Log]) -> list[list[int]]:
    """Return for each log the length that it has in common with each session. Their prompt is compared once."""
    every = (*sessions, *logs)
    shared = min((common_prefix_length(every[0], each) for each in every[1:]), default=0)
    ends = [session[shared:] for session in sessions]
    return [[shared + common_prefix_length(end, log[shared:]) for end in ends] for log in logs]


def _choose(own: int | None, common: Sequence[int], length: int) -> Source:
    if not common:
        return Source()
    parent = max(range(len(common)), key=lambda place: common[place])
    position = min(common[parent], length - 1)  # the last entry is computed, for its logits
    saved = position - (0 if own is None else common[own])
    least = 1 if own is None else FORK_TOKENS
    return Source(own, parent, position) if saved >= least else Source(own)
