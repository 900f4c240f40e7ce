"""What the core asks the servers about sessions that are not here, as calls that wait for the answer (R20).

Used by the node, which hands it the core's Whereabouts and Fetched. Every wait ends: the core sees to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.session_search import Fetched, Holder, Whereabouts


class SessionQueries:
    def __init__(
        self,
        core: GatewayCore,
        clock: Callable[[], float],
        flush: Callable[[], None],
        unreachable_servers: Callable[[str], Collection[PeerId]],
    ) -> None:
        """`cut_off` tells the servers of a model that are there, and have no link now."""
        self._core, self._clock, self._flush = core, clock, flush
        self._unreachable_servers = unreachable_servers
        self._found: dict[str, asyncio.Future[Whereabouts]] = {}
        self._claiming: set[str] = (
            set()
        )  # of these searches, those of who is about to open the session
        self._fetched: dict[str, asyncio.Future[Fetched]] = {}

    def on_answer(self, answer: Whereabouts | Fetched) -> None:
        if isinstance(answer, Whereabouts):
            self._claiming.discard(answer.session)
            waiting = self._found.pop(answer.session, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        else:
            fetching = self._fetched.pop(answer.session, None)
            if fetching is not None and not fetching.done():
                fetching.set_result(answer)

    async def find_session(self, session: str, model: str, claims: bool = False) -> Whereabouts:
        while claims and session in self._found and session not in self._claiming:
            await asyncio.shield(self._found[session])  # it tells too little: ask again
        waiting = self._found.get(session)
        if waiting is None:
            waiting = self._found[session] = asyncio.get_running_loop().create_future()
            if claims:
                self._claiming.add(session)
            self._core.find(
                session, model, self._clock(), self._unreachable_servers(model), opens=claims
            )
            self._flush()
        return await asyncio.shield(waiting)

    async def take_over(
        self, where: Whereabouts, model: str, check: Callable[[Sequence[int]], None]
    ) -> bool:
        """False: nobody has its log any more, or somebody else was faster. The first that has the log gives it.

        `check` raises if that log is not the right one: then nothing changes hands.
        """
        for holder in where.holders:
            log = await self._fetch(where.session, holder)
            if log.turn is None or not log.tokens:
                continue
            check(log.tokens)
            self._core.adopt(where, model, log, self._clock())
            self._flush()
            return True
        return False

    async def _fetch(self, session: str, holder: Holder) -> Fetched:
        waiting: asyncio.Future[Fetched] = asyncio.get_running_loop().create_future()
        self._fetched[session] = waiting
        self._core.fetch(session, holder, self._clock())
        self._flush()
        return await waiting
