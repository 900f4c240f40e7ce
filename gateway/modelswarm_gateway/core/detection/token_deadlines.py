"""Token deadlines (R21, failure detection): latest time of a session's next token, from its servers' step times.

Pure; used by `monitor.py`, which keeps a `Progress` per session. Generous on purpose: a deadline that is too short
costs a Fence, while most faults are found by other means. Knows no silence and no links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from modelswarm.protocol.identity import Epoch
from modelswarm_gateway.core.servers.step_times import StepTimes
from modelswarm_gateway.core.sessions.session import Session, SessionState

# Multiple of the expected time that is waited for.
SLACK_FACTOR = 4.0
# Greatest timeout in seconds.
MAX_TIMEOUT = 120.0
# Number of times a timeout doubles at most.
MAX_DOUBLINGS = 4
# Factor by which the longest time per token decays with every token.
GAP_DECAY = 0.95


@dataclass(slots=True)
class Progress:
    """The last progress of a session."""

    epoch: Epoch
    items: int  # Tokens logged, and items with returned rows or scores
    progress_at: float
    seconds_per_token: float = 0.0  # the longest of the last ones; forced tokens take none

    def observe(self, session: Session, time: float) -> None:
        if (session.epoch, session.progress) == (self.epoch, self.items):
            return
        if session.epoch == self.epoch:
            gap = (time - self.progress_at) / (session.progress - self.items)
            self.seconds_per_token = max(gap, GAP_DECAY * self.seconds_per_token)
        self.epoch, self.items, self.progress_at = session.epoch, session.progress, time


def is_token_due(session: Session) -> bool:
    """True if the swarm may produce a token, or rows, now: the client has read enough (R7, credit)."""
    return session.state is SessionState.RUNNING and session.has_credit


def token_timeout(expected: float, overdues: int) -> float:
    """Return the seconds to wait for a token that is expected in `expected` seconds.

    Doubled each time a token was overdue. Recoveries for other causes do not count: they do not refute the expectation.
    """
    return min(MAX_TIMEOUT, expected * float(1 << min(overdues, MAX_DOUBLINGS)))


def expected_seconds(
    least: float,
    seconds_per_token: float,
    step_times: Sequence[StepTimes],
    pending_rows: int,
    now: float,
) -> float:
    """Return the seconds in which the next token is expected over hops with these step times.

    `pending_rows`: rows of prompts and replays not yet prefilled there, those of other sessions included.
    """
    steps = sum(each.longest_step for each in step_times)
    prefill = pending_rows * sum(each.prefill_seconds_per_row for each in step_times)
    queue = sum(each.queue_seconds for each in step_times if each.is_progressing(now))
    return least + queue + SLACK_FACTOR * (steps + prefill + seconds_per_token)
