"""How long sessions of a model may be held: as the latest of its servers said, else as this gateway was told.

Used by the loop (`recovery.py`), by `detection.py` for Fences and, through the core, by the doors: whoever waits within
a hold asks here how long that is. Pure.
"""

from __future__ import annotations

from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.interface.settings import GatewaySettings

MAX_HOLD_SECONDS = 24 * 3600.0  # seconds; whatever a server says


class HoldLimits:
    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._announced: dict[
            str, float
        ] = {}  # model -> seconds; kept while no server of it is there

    def record_hello(self, hello: Hello) -> None:
        if hello.hold_ms:
            self._announced[hello.model] = min(hello.hold_ms / 1000, MAX_HOLD_SECONDS)

    def limit_seconds(self, model: str) -> float:
        """0: its sessions are not held at all."""
        return self._announced.get(model, self._settings.hold_limit_seconds)

    def fence_timeout_seconds(self, model: str) -> float:
        """For how long an answer to a Fence is waited for if there is no way around it: no longer than a session is
        held, but long enough for its server to be suspected before."""
        settings, hold = self._settings, self.limit_seconds(model)
        if not hold:
            return settings.fence_timeout_seconds
        return min(settings.fence_timeout_seconds, max(hold, 2 * settings.suspect_after_seconds))
