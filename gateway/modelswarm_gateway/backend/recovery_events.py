"""Which turns look for a route again or are moved, why, and how that ended; who was ejected: told to whoever counts it.

Used by the node. A turn carries its own cause, so nothing is left behind when it ends.
"""

from __future__ import annotations

from modelswarm_gateway.backend.protocol import EventObserver, RecoveryResult, TokenStream
from modelswarm_gateway.core.interface.effects import Ejected, Moved


class RecoveryEvents:
    def __init__(self) -> None:
        self.observer: EventObserver | None = None
        self._models: dict[str, str] = {}  # of open sessions

    def session_opened(self, session: str, model: str) -> None:
        self._models[session] = model

    def session_closed(self, session: str) -> None:
        self._models.pop(session, None)

    def record_reroute(self, session: str, stream: TokenStream | None, cause: str) -> None:
        if stream is not None:
            stream.reroutes += 1
            stream.fault_cause = stream.fault_cause or cause
        if self.observer is not None:
            self.observer.on_rerouted(self._models.get(session, ""), cause)

    def record_resumption(self, session: str, stream: TokenStream | None, seconds: float) -> None:
        """A hop that did not answer is a fault that nobody reported."""
        if stream is not None:
            stream.fault_cause = stream.fault_cause or "silent"
            self.finish(session, stream, "resumed", seconds)

    def record_migration(self, moved: Moved) -> None:
        if self.observer is not None:
            self.observer.on_migrated(self._models.get(moved.session, ""), moved.why, moved.outcome)

    def record_ejection(self, ejected: Ejected) -> None:
        if self.observer is not None:
            self.observer.on_ejected(ejected.model, ejected.cause)

    def finish(
        self, session: str, stream: TokenStream | None, outcome: str, seconds: float | None = None
    ) -> None:
        """Its recovery ends, if it was in one."""
        if stream is None or not stream.fault_cause:
            return
        cause, stream.fault_cause = stream.fault_cause, ""
        if self.observer is not None:
            recovery = RecoveryResult(cause, outcome, seconds)
            self.observer.on_recovered(self._models.get(session, ""), recovery)
