"""Readiness of a gateway in a cluster: it is ready once it has caught up with the swarms that exist.

Used by `app.py`. Without a cluster, a gateway is ready while a model is. In a cluster it must not wait for a model. A
gateway that starts before the first server would block every rollout that waits for it. But a gateway that joins others
must not answer "no such model" while its links are being made. Knows neither pods nor links.
"""

from __future__ import annotations

from collections.abc import Callable

CATCH_UP_SECONDS = 5.0


class Readiness:
    def __init__(
        self,
        undiscovered_reason: Callable[[], str | None],
        is_settled: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """`undiscovered_reason` returns why the servers are not known yet. `is_settled`: their models are known."""
        self._undiscovered_reason, self._is_settled, self._clock = (
            undiscovered_reason,
            is_settled,
            clock,
        )
        self._known_at: float | None = None
        self._ready = False

    def unready_reason(self) -> str | None:
        """Return why the gateway is not ready; None when it is. A ready gateway stays ready: it forgets no server."""
        if self._ready:
            return None
        reason = self._undiscovered_reason()
        if reason is not None:
            return reason
        if self._known_at is None:
            self._known_at = self._clock()
        self._ready = self._is_settled() or self._clock() - self._known_at > CATCH_UP_SECONDS
        return None if self._ready else "links to the servers are being made"
