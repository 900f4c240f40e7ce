"""Hold limits: the longest time that sessions of a model may be held.

The newest Hello of the model's servers decides; without one, the gateway's own setting. Used by the recovery loop, by
`detection/monitor.py` for Fences and, through the core, by the API for its own waits. Pure; knows no sessions.
"""

from __future__ import annotations

from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.servers.variant import variants_of

MAX_HOLD_SECONDS = 24 * 3600.0  # upper bound of what a server may announce


class HoldLimits:
    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._announced: dict[str, float] = {}  # model -> seconds; kept when its servers disconnect

    def record_hello(self, hello: Hello) -> None:
        """Adopt the hold limit that a server announces, if it does."""
        if hello.hold_ms:
            for model in variants_of(hello):
                self._announced[model] = min(hello.hold_ms / 1000, MAX_HOLD_SECONDS)

    def limit_seconds(self, model: str) -> float:
        """Return the hold limit of a model in seconds; 0: its sessions are not held."""
        return self._announced.get(model, self._settings.hold_limit_seconds)

    def fence_timeout_seconds(self, model: str) -> float:
        """Return the time to wait for a FenceAck if no route avoids that server.

        It is no longer than the hold limit, but long enough for the server to be suspected first.
        """
        settings, hold = self._settings, self.limit_seconds(model)
        if not hold:
            return settings.fence_timeout_seconds
        return min(settings.fence_timeout_seconds, max(hold, 2 * settings.suspect_after_seconds))
