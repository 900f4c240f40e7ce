"""Queries to the servers about sessions that are not open here, as calls that await the answer (R20, takeover).

Used by the node, which hands it the core's answers. Every wait ends: the core gives up a query after a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.interface.session_search import FetchedLog, LogHolder, SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.runtime.core_driver import CoreDriver


class SessionQueries:
    def __init__(
        self,
        driver: CoreDriver,
        unreachable_servers: Callable[[str], Collection[PeerId]],
    ) -> None:
        """`unreachable_servers` returns the servers of a model that may be running but have no link now."""
        self._driver, self._core = driver, driver.core
        self._unreachable_servers = unreachable_servers
        self._found: dict[str, asyncio.Future[SessionLocation]] = {}
        self._claiming: set[str] = set()  # searches of `_found` that claim the session's name
        self._fetched: dict[str, asyncio.Future[FetchedLog]] = {}

    def on_answer(self, answer: SessionLocation | FetchedLog) -> None:
        if isinstance(answer, SessionLocation):
            self._claiming.discard(answer.session)
            waiting = self._found.pop(answer.session, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        else:
            fetching = self._fetched.pop(answer.session, None)
            if fetching is not None and not fetching.done():
                fetching.set_result(answer)

    async def find_session(self, session: str, model: str, claims: bool = False) -> SessionLocation:
        while claims and session in self._found and session not in self._claiming:
            await asyncio.shield(self._found[session])  # that search does not claim: ask again
        waiting = self._found.get(session)
        if waiting is None:
            waiting = self._found[session] = asyncio.get_running_loop().create_future()
            if claims:
                self._claiming.add(session)
            self._driver.call(
                lambda now: self._core.find_session(
                    session, model, now, self._unreachable_servers(model), claims=claims
                )
            )
        return await asyncio.shield(waiting)

    async def take_over(
        self, where: SessionLocation, model: str, check: Callable[[ParkedTurn], object]
    ) -> bool:
        """Open the session from the log of the first holder that still has it; return False if none has.

        `check` raises if the log is not the expected one; then the session's owner does not change.
        """
        for holder in where.log_holders:
            log = await self._fetch(where.session, holder)
            if log.turn is None or not log.tokens:
                continue
            check(ParkedTurn(log.tokens, log.turn))
            self._driver.call(self._core.take_over, where, model, log)
            return True
        return False

    async def _fetch(self, session: str, holder: LogHolder) -> FetchedLog:
        waiting: asyncio.Future[FetchedLog] = asyncio.get_running_loop().create_future()
        self._fetched[session] = waiting
        self._driver.call(self._core.fetch_log, session, holder)
        return await waiting
