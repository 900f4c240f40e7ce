"""Which turns look for a route again or are moved, why, and how that ended; who was ejected: told to whoever counts it.

Used by the node. A turn carries its own cause, so nothing is left behind when it ends.
"""

from __future__ import annotations

from modelswarm_gateway.backend.protocol import Recovery, TokenStream, Watcher
from modelswarm_gateway.core.interface.effects import Ejected, Moved


class Faults:
    def __init__(self) -> None:
        self.watcher: Watcher | None = None
        self._models: dict[str, str] = {}  # of open sessions

    def opened(self, session: str, model: str) -> None:
        self._models[session] = model

    def closed(self, session: str) -> None:
        self._models.pop(session, None)

    def rerouted(self, session: str, stream: TokenStream | None, cause: str) -> None:
        if stream is not None:
            stream.reroutes += 1
            stream.cause = stream.cause or cause
        if self.watcher is not None:
            self.watcher.rerouted(self._models.get(session, ""), cause)

    def resumed(self, session: str, stream: TokenStream | None, seconds: float) -> None:
        """A hop that did not answer is a fault that nobody reported."""
        if stream is not None:
            stream.cause = stream.cause or "silent"
            self.over(session, stream, "resumed", seconds)

    def moved(self, moved: Moved) -> None:
        if self.watcher is not None:
            self.watcher.moved(self._models.get(moved.session, ""), moved.why, moved.outcome)

    def ejected(self, ejected: Ejected) -> None:
        if self.watcher is not None:
            self.watcher.ejected(ejected.model, ejected.cause)

    def over(
        self, session: str, stream: TokenStream | None, outcome: str, seconds: float | None = None
    ) -> None:
        """Its recovery ends, if it was in one."""
        if stream is None or not stream.cause:
            return
        cause, stream.cause = stream.cause, ""
        if self.watcher is not None:
            recovery = Recovery(cause, outcome, seconds)
            self.watcher.recovered(self._models.get(session, ""), recovery)
