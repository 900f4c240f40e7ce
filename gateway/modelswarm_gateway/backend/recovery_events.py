"""Reports reroutes, recoveries, migrations and ejections to one observer: the metrics.

Used by the node. A turn's stream carries the cause of its fault, so no state is left behind when the turn ends. Decides
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from modelswarm_gateway.backend.token_stream import TokenStream
from modelswarm_gateway.core.interface.effects import Ejected, MigrationEnded


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """The end of one recovery: the session's search for a new route."""

    OUTCOMES: ClassVar = ("resumed", "failed", "abandoned")

    cause: str  # of the first fault
    outcome: str  # abandoned: the turn ended before it needed the new route
    seconds: float | None = None  # from the first fault to the next token


class EventObserver(Protocol):
    """Counts faults and their outcomes."""

    def on_rerouted(self, model: str, cause: str) -> None: ...

    def on_recovered(self, model: str, recovery: RecoveryResult) -> None: ...

    def on_migrated(self, model: str, cause: str, outcome: str) -> None: ...

    def on_ejected(self, model: str, cause: str) -> None: ...

    def on_grammar_version_changed(self, model: str) -> None: ...

    def on_numerics_changed(self, model: str) -> None: ...


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
        """Record the end of a recovery. Without a reported fault the cause is a hop that did not respond: "silent"."""
        if stream is not None:
            if not stream.fault_cause:
                self.record_reroute(session, stream, "silent")
            self.finish(session, stream, "resumed", seconds)

    def record_grammar_version(self, session: str) -> None:
        if self.observer is not None:
            self.observer.on_grammar_version_changed(self._models.get(session, ""))

    def record_numerics(self, session: str) -> None:
        if self.observer is not None:
            self.observer.on_numerics_changed(self._models.get(session, ""))

    def record_migration(self, moved: MigrationEnded) -> None:
        if self.observer is not None:
            self.observer.on_migrated(
                self._models.get(moved.session, ""), moved.cause, moved.outcome
            )

    def record_ejection(self, ejected: Ejected) -> None:
        if self.observer is not None:
            self.observer.on_ejected(ejected.model, ejected.cause)

    def finish(
        self, session: str, stream: TokenStream | None, outcome: str, seconds: float | None = None
    ) -> None:
        """Record the end of the stream's recovery, if it was recovering."""
        if stream is None or not stream.fault_cause:
            return
        cause, stream.fault_cause = stream.fault_cause, ""
        if self.observer is not None:
            recovery = RecoveryResult(cause, outcome, seconds)
            self.observer.on_recovered(self._models.get(session, ""), recovery)
