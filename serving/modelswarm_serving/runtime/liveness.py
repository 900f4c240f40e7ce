"""Whether this process lives and whether it serves: what /live and /ready answer.

Written by `main.py` and `node.py`, read by the threads of `page.py`; every field is one value, so no lock is needed.
Lives: loading may take as long as it takes; after that the event loop turns, and no step is out for minutes. Serves:
the blocks are loaded and links are listened for. Both are local: a neighbour that is down changes neither.
"""

from __future__ import annotations

from collections.abc import Callable

LOOP_SECONDS = 30.0  # it turns every 0.1 s
STEP_SECONDS = 300.0  # the longest honest step, on the slowest machine


class Health:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turned: float | None = None  # None: the event loop does not run yet
        self._stepping: float | None = None  # since when a step is out
        self._unready: str | None = "the model is being loaded"

    def turned(self) -> None:
        """The event loop has come round."""
        self._turned = self._clock()

    def step_began(self) -> None:
        self._stepping = self._clock()

    def step_ended(self) -> None:
        self._stepping = None

    def serves(self) -> None:
        self._unready = None

    def leaves(self) -> None:
        self._unready = "the server is stopping"

    @property
    def stuck(self) -> str | None:
        """What stands still; None while all goes on."""
        now, turned, stepping = self._clock(), self._turned, self._stepping
        if turned is not None and now - turned > LOOP_SECONDS:
            return f"the event loop has stood still for {now - turned:.0f} s"
        if stepping is not None and now - stepping > STEP_SECONDS:
            return f"a step has run for {now - stepping:.0f} s"
        return None

    @property
    def unready(self) -> str | None:
        """Why nobody should count on it; None when it serves."""
        return self._unready or self.stuck
