"""When a session's next token is overdue, by what its servers say of their steps (R21).

Pure; used by `detection.py`, which keeps a `Progress` per session. Generous on purpose: a deadline that was too short
costs a Fence, while what is broken is mostly found by other means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import Epoch
from modelswarm_gateway.core.servers.step_times import StepTimes
from modelswarm_gateway.core.sessions.session import Session, State

SLACK_FACTOR = 4.0  # times what is expected
MAX_TIMEOUT = 120.0  # seconds; nothing is waited for longer
MAX_DOUBLINGS = 4


@dataclass(slots=True)
class Progress:
    """How far a session was when it last got on, and since when it stands there."""

    epoch: Epoch
    length: int
    progress_at: float
    seconds_per_token: float = 0.0  # seconds per token; of the last ones the longest

    def observe(self, session: Session, time: float) -> None:
        if (session.epoch, session.length) == (self.epoch, self.length):
            return
        if session.epoch == self.epoch and session.length > self.length:
            gap = (time - self.progress_at) / (session.length - self.length)
            self.seconds_per_token = max(gap, 0.95 * self.seconds_per_token)
        self.epoch, self.length, self.progress_at = session.epoch, session.length, time


def is_token_due(session: Session) -> bool:
    """Whether the swarm may make a token now: the reader is not behind (R7)."""
    return session.state is State.RUNNING and session.length <= session.credit


def token_timeout(expected: float, overdues: int) -> float:
    """Seconds in which a token must come that is expected in so many; twice as long each time that it did not. Loops
    for other causes say nothing against what is expected."""
    return min(MAX_TIMEOUT, expected * float(1 << min(overdues, MAX_DOUBLINGS)))


def expected_seconds(least: float, seconds_per_token: float, step_times: Sequence[StepTimes], pending_rows: int, now: float) -> float:
    """Seconds in which the next token should come over hops with these paces. `rows`: of prompts and replays that are
    still to be read there, those of other sessions too."""
    steps = sum(pace.longest_step for pace in step_times)
    reading = pending_rows * sum(pace.prefill_seconds_per_row for pace in step_times)
    queue = sum(pace.queue_seconds for pace in step_times if pace.is_progressing(now))
    return least + queue + SLACK_FACTOR * (steps + reading + seconds_per_token)
