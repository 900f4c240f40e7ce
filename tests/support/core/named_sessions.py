"""The real SessionQueries, NamedSessions and SessionLocator of one gateway, around its core.

Used by tests of session ownership and of claims of names, on the in-memory network.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.core.gateway import FOREVER, Gateway
from support.core.server import MODEL
from typing_extensions import override

from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.core.sessions.epoch_counters import lowest_epoch
from modelswarm_gateway.generation.named_sessions import NamedSessions, wire_name
from modelswarm_gateway.generation.request import GenerationRequest, TokenPrompt
from modelswarm_gateway.generation.session_locator import SessionLocator
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.runtime.core_driver import CoreDriver
from modelswarm_gateway.runtime.session_queries import SessionQueries

KEY = (MODEL, "talk")
NAME = wire_name(KEY)


class _VirtualSelector(selectors.SelectSelector):
    """Calls `advance` where an event loop would sleep."""

    def __init__(self, advance: Callable[[], None]) -> None:
        super().__init__()
        self._advance = advance

    @override
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout > 0:
            self._advance()
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop on the clock of the network: the order of events depends on no real time."""

    def __init__(self, sessions: GatewaySessions) -> None:
        super().__init__(_VirtualSelector(sessions.advance))
        self._network = sessions.gateway.network

    @override
    def time(self) -> float:
        return self._network.now


@dataclass
class GatewaySessions:
    """The named sessions of one gateway. It implements the part of SessionBackend that its locator calls."""

    gateway: Gateway
    seen: int = 0
    queries: SessionQueries = field(init=False)
    named_sessions: NamedSessions = field(init=False)
    locator: SessionLocator = field(init=False)

    def __post_init__(self) -> None:
        core = self.gateway.core
        self.queries = SessionQueries(CoreDriver(core, self._now, self._flush), lambda _: ())
        self.named_sessions = NamedSessions(
            self._open,
            lambda name: core.close_session(name, self.gateway.network.now),
            self._now,
            limit=10,
            idle_seconds=600.0,
        )
        self.locator = SessionLocator(self, self.named_sessions, self._now)  # type: ignore[arg-type]

    def _now(self) -> float:
        return self.gateway.network.now

    def _open(self, key: tuple[str, str], above: int) -> str:
        self.gateway.core.open_session(wire_name(key), key[0], self.gateway.network.now, above)
        return wire_name(key)

    def _flush(self) -> None:
        self.gateway.network.collect()
        new = self.gateway.effects[self.seen :]
        self.seen = len(self.gateway.effects)
        for effect in new:
            if isinstance(effect, SessionLocation | FetchedLog):
                self.queries.on_answer(effect)

    def raise_epoch(self, session: str, epoch_floor: int) -> None:
        above = lowest_epoch(epoch_floor, self._now())
        self.gateway.core.raise_epoch(session, above)

    async def find_session(self, session: str, model: str, opens: bool = False) -> SessionLocation:
        return await self.queries.find_session(session, model, opens)

    async def take_over(
        self, where: SessionLocation, model: str, check: Callable[[ParkedTurn], object]
    ) -> bool:
        return await self.queries.take_over(where, model, check)

    def parked_turn(self, session: str) -> ParkedTurn | None:
        return self.gateway.core.parked_turn(session)

    def session(self, name: str) -> SessionView | None:
        return self.gateway.core.find_view(name)

    def advance(self) -> None:
        self.gateway.network.wait(0.1)
        self._flush()

    def acquire_session(
        self, prompt: Sequence[int], after: float = 0.0, event: Callable[[], None] = lambda: None
    ) -> int:
        """Acquire the session. Raises OwnedElsewhere if another gateway owns it.

        `event` happens meanwhile, `after` that many virtual seconds.
        """
        request = GenerationRequest(
            MODEL, TokenPrompt(tuple(prompt)), "prompt", SamplingOptions(), session_id=KEY[1]
        )

        async def run() -> int:
            asyncio.get_running_loop().call_later(after, event)
            return await self.locator.acquire(request, KEY, lambda _: None)

        with asyncio.Runner(loop_factory=lambda: VirtualLoop(self)) as runner:
            return runner.run(run())

    def turn(self, prompt: Sequence[int], new: int, ahead: int = FOREVER) -> None:
        """Begin a turn of a request that names the session."""
        name = self.named_sessions.acquire(KEY, self.acquire_session(prompt))
        self.gateway.begin(name, prompt, new, ahead)
