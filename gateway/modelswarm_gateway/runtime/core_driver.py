"""Calls the gateway's core with the time of the clock and carries out its effects afterwards.

Made by the node, used by it, by the drains and by the session queries. Knows neither sessions nor effects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

from modelswarm_gateway.core.gateway import GatewayCore

Args = TypeVarTuple("Args")
Result = TypeVar("Result")


class CoreDriver:
    def __init__(
        self, core: GatewayCore, clock: Callable[[], float], flush: Callable[[], None]
    ) -> None:
        """`flush` carries out the effects that the core has decided on."""
        self.core, self.clock, self.flush = core, clock, flush

    def call(self, method: Callable[[*Args, float], Result], *args: *Args) -> Result:
        """Call `method(*args, now)` and flush. After an error nothing is flushed."""
        result = method(*args, self.clock())
        self.flush()
        return result
