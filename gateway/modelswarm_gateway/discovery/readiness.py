"""When a gateway of a cluster lets clients come: once it has caught up with the swarms that are there.

Used by `main.py`; without a cluster, a gateway is ready while a model can answer. Here it must not wait for that: a
gateway that comes up before the first server would hold up whatever waits for it. But one that joins others must not
answer "no such model" for the moment that its links take.
"""

from __future__ import annotations

from collections.abc import Callable

CATCH_UP_SECONDS = 5.0


class Readiness:
    def __init__(
        self,
        unknown: Callable[[], str | None],
        settled: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """`unknown`: why it is not known who exists. `settled`: everybody has been tried."""
        self._unknown, self._settled, self._clock = unknown, settled, clock
        self._known_at: float | None = None
        self._ready = False

    def unready_reason(self) -> str | None:
        """Why clients should not come yet. Once ready, it stays so: what is known does not go."""
        if self._ready:
            return None
        reason = self._unknown()
        if reason is not None:
            return reason
        if self._known_at is None:
            self._known_at = self._clock()
        self._ready = self._settled() or self._clock() - self._known_at > CATCH_UP_SECONDS
        return None if self._ready else "links to the servers are being made"
