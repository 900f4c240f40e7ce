"""The turns of passes at the engine: a class of its own, below the rows of sessions.

A part of a pass runs while no row waits. While rows wait, steps get four times the time of the last part before the
next one. However late the loop is, a step runs between two parts. So a row waits for one part at most, and passes take
a fifth of a busy engine. Pure: the time is a parameter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelswarm_serving.model.base import Task
from modelswarm_serving.model.passes.contract import RunningPass

STEP_SHARE = 4.0
"""Time of steps after each part of a pass, as a multiple of the part's time."""


@dataclass(eq=False, slots=True)
class ScheduledPass:
    """A pass that has all its input. `on_end` gets its result, or the sentence of its failure."""

    running: RunningPass
    on_end: Callable[[bytes | str | None], None]
    is_abandoned: bool = False  # its caller is gone
    has_ended: bool = False  # the engine has nothing of it any more

    def end(self, result: bytes | str | None) -> None:
        self.has_ended = True
        self.on_end(result)


class PassSchedule:
    def __init__(self) -> None:
        self._waiting: deque[ScheduledPass] = deque()
        self._current: ScheduledPass | None = None
        self._began = self._resume_at = 0.0
        self._has_stepped = True  # since the last part

    def next_turn(
        self, now: float, plan_step: Callable[[], Sequence[Task]]
    ) -> RunningPass | Sequence[Task] | None:
        """Return what the engine runs next: the pass of the next part, or a step; None if nothing waits.

        `plan_step` plans the step of the rows that wait.
        """
        if self._waiting and self._has_stepped and now >= self._resume_at:
            return self._begin_part(now)
        if step := plan_step():
            self._has_stepped = True
            return step
        return self._begin_part(now) if self._waiting else None

    def enqueue_pass(self, scheduled: ScheduledPass) -> None:
        self._waiting.append(scheduled)

    def abandon(self, scheduled: ScheduledPass) -> None:
        """The caller is gone: the pass ends behind its running part."""
        scheduled.is_abandoned = True
        if scheduled in self._waiting:
            self._waiting.remove(scheduled)
            scheduled.end(None)

    def _begin_part(self, now: float) -> RunningPass:
        """Return the pass whose next part shall run; passes take turns."""
        self._current, self._began, self._has_stepped = self._waiting.popleft(), now, False
        return self._current.running

    def finish_part(self, result: bytes | str | None, now: float) -> None:
        """Take the outcome of the part: None if more follow, the result behind the last one, or a failure."""
        current, self._current = self._current, None
        assert current is not None
        self._resume_at = now + STEP_SHARE * (now - self._began)
        if result is None and not current.is_abandoned:
            self._waiting.append(current)
        else:
            current.end(result)
