"""Timeouts that contradict each other are refused when the gateway starts, in one sentence that names both flags.

Used by `settings.py`. What is not given fits what is; only what a person has said twice can be a conflict. What servers
were started with is known when they are linked (`node.py`): then it is said in the log which of the two counts.
"""

from __future__ import annotations

from modelswarm.errors import UserError
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.detection.failure_detector import min_timeout

KEEPALIVE, FENCE, SILENCE, DEAD = 5.0, 5.0, 0.3, 15.0  # seconds, where nobody says otherwise
LEAST_KEEPALIVE = 0.1
TWO_BEATS = 0.2  # a server that lives is silent for one of them


def keepalive_seconds(wanted: float | None, hold: float) -> float:
    """Of a `--hold-limit` of 0 nobody waits: then any will do."""
    if wanted is None:
        return min(KEEPALIVE, hold / 2) if hold else KEEPALIVE
    if 0 < hold <= wanted:
        raise UserError(
            "--keepalive",
            f"{wanted:g} s is not below --hold-limit {hold:g} s: who waits would hear nothing until it ends",
        )
    return wanted


def keepalive_within(keepalive: float, hold: float) -> float:
    """For sessions that may be held for `hold` seconds, as their servers said: who waits hears of it before the end."""
    if not hold or keepalive < hold:
        return keepalive
    return max(hold / 2, LEAST_KEEPALIVE)


def fence_seconds(wanted: float | None, silence: float | None, hold: float) -> float:
    """Nobody is waited for longer than sessions wait, nor given up before it can be suspected."""
    fence = _fence_that_fits(silence, hold) if wanted is None else wanted
    if wanted is not None and 0 < hold < wanted:
        raise UserError(
            "--fence-timeout",
            f"{wanted:g} s is more than --hold-limit {hold:g} s: a session would end while it is fenced",
        )
    if silence is None and fence <= SILENCE:
        raise UserError(
            "--fence-timeout",
            f"{fence:g} s is not above --suspect-after {SILENCE:g} s: a server would be given up before it is suspected",
        )
    if silence is not None and silence >= fence:
        raise UserError(
            "--suspect-after",
            f"{silence:g} s is not below --fence-timeout {fence:g} s: a server would be given up before it is suspected",
        )
    return fence


def _fence_that_fits(silence: float | None, hold: float) -> float:
    """Within the hold, as far as there is time left to suspect anybody before."""
    least = 2 * (SILENCE if silence is None else silence)
    return min(FENCE, max(hold, least)) if hold else FENCE


def beat_fault(silence: float, hello: Hello) -> str | None:
    """What to tell people of a server that may live and be silent for longer than is suspicious here."""
    patience = min_timeout(silence, hello.heartbeat_ms / 1000)
    if patience == silence:
        return None
    return (
        f"{hello.peer} was started with --heartbeat {hello.heartbeat_ms / 1000:g}, this process with --suspect-after {silence:g}, "
        f"less than two of those: {patience:g} s of silence are allowed to it; lower --heartbeat, or raise --suspect-after"
    )


def hold_fault(fence: float, hello: Hello) -> str | None:
    """What to tell people of a server whose sessions would end while they are fenced."""
    if not 0 < hello.hold_ms / 1000 < fence:
        return None
    return (
        f"{hello.peer} was started with --hold-limit {hello.hold_ms / 1000:g}, this process with --fence-timeout {fence:g}: of "
        f"{hello.model} nobody is waited for longer than the hold; lower --fence-timeout, or raise --hold-limit (sessions.holdLimit)"
    )


def dead_seconds(silence: float) -> float:
    """A link is not closed before its server could be suspected."""
    return max(DEAD, 2 * silence)
