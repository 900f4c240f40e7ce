"""Whether this process lives and whether it serves: what /live and /ready answer.

Written by `main.py` and `node.py`, read by the threads of `page.py`; every field is one value, so no lock is needed.
Lives: loading may take as long as it takes; after that the event loop turns, and no step is out for minutes. Serves:
the blocks are loaded and links are listened for. Both are local: a neighbour that is down changes neither.
"""

from __future__ import annotations

from collections.abc import Callable

LOOP_SECONDS = 30.0  # it turns every 0.1 s
STEP_SECONDS = 300.0  # the longest honest step, on the slowest machine


class Liveness:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_loop: float | None = None  # None: the event loop does not run yet
        self._step_started: float | None = None  # since when a step is out
        self._not_serving: str | None = "the model is being loaded"

    def on_loop(self) -> None:
        """The event loop has come round."""
        self._last_loop = self._clock()

    def on_step_started(self) -> None:
        self._step_started = self._clock()

    def on_step_finished(self) -> None:
        self._step_started = None

    def mark_ready(self) -> None:
        self._not_serving = None

    def mark_stopping(self) -> None:
        self._not_serving = "the server is stopping"

    @property
    def stall_reason(self) -> str | None:
        """What stands still; None while all goes on."""
        now, turned, stepping = self._clock(), self._last_loop, self._step_started
        if turned is not None and now - turned > LOOP_SECONDS:
            return f"the event loop has stood still for {now - turned:.0f} s"
        if stepping is not None and now - stepping > STEP_SECONDS:
            return f"a step has run for {now - stepping:.0f} s"
        return None

    @property
    def unready_reason(self) -> str | None:
        """Why nobody should count on it; None when it serves."""
        return self._not_serving or self.stall_reason
