"""Timeouts that contradict each other are refused when the gateway starts, in one sentence that names both flags.

Used by `settings.py`. What is not given fits what is; only what a person has said twice can be a conflict.
"""

from __future__ import annotations

from modelswarm.errors import UserError

KEEPALIVE, FENCE, SILENCE, DEAD = 5.0, 5.0, 0.3, 15.0  # seconds, where nobody says otherwise
TWO_BEATS = 0.2  # a server that lives is silent for one of them


def keepalive_seconds(wanted: float | None, hold: float) -> float:
    """Of a `--hold` of 0 nobody waits: then any will do."""
    if wanted is None:
        return min(KEEPALIVE, hold / 2) if hold else KEEPALIVE
    if 0 < hold <= wanted:
        raise UserError(
            "--keepalive",
            f"{wanted:g} s is not below --hold {hold:g} s: who waits would hear nothing until it ends",
        )
    return wanted


def fence_seconds(wanted: float | None, silence: float | None, hold: float) -> float:
    """Nobody is waited for longer than sessions wait, nor given up before it can be suspected."""
    fence = FENCE if wanted is None else wanted
    if wanted is not None and 0 < hold < wanted:
        raise UserError(
            "--fence",
            f"{wanted:g} s is more than --hold {hold:g} s: a session would end while it is fenced",
        )
    if silence is None and fence <= SILENCE:
        raise UserError(
            "--fence",
            f"{fence:g} s is not above --silence {SILENCE:g} s: a server would be given up before it is suspected",
        )
    if silence is not None and silence >= fence:
        raise UserError(
            "--silence",
            f"{silence:g} s is not below --fence {fence:g} s: a server would be given up before it is suspected",
        )
    return fence


def dead_seconds(silence: float) -> float:
    """A link is not closed before its server could be suspected."""
    return max(DEAD, 2 * silence)
