"""Brings a named session here, or says where it is: kept here, adopted from a gateway that is gone, at another gateway,
or nowhere yet (R20).

Used by the service before a turn of a named session begins. Decides who answers; knows nothing of how sessions are
taken over, nor of text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial

from modelswarm_gateway.backend.protocol import Engine
from modelswarm_gateway.core.interface.effects import SessionView, Whereabouts
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import Key, SessionBook, wire_name
from modelswarm_gateway.generation.request import Ask
from modelswarm_gateway.generation.resumption import check_mark

PATIENCE = 60.0  # seconds that a request waits for a lease to end: two of the usual ones
LOOK_AGAIN = 1.0
ASK_AGAIN = 3.0  # seconds for which servers that are silent or cut off are asked again


class Elsewhere(Exception):
    """A gateway that lives has the session; `http` and `grpc` are its doors."""

    def __init__(self, target: str) -> None:
        super().__init__(f"the session is at {target}")
        self.http, _, self.grpc = target.partition(",")


class Finder:
    def __init__(self, engine: Engine, book: SessionBook, clock: Callable[[], float]) -> None:
        self._engine, self._book, self._clock = engine, book, clock
        self._coming: set[Key] = set()

    async def bring(self, ask: Ask, key: Key) -> int:
        """Returns when a turn may begin here, with the epoch that a session of that name has reached.

        Raises Elsewhere, or ApiError when it cannot be had now.
        """
        if self._book.busy(key):
            return 0
        kept = self._kept(key)
        if kept is not None and kept.seen:
            return 0
        if key in self._coming:
            raise self._book.is_busy(key)
        self._coming.add(key)
        try:
            return await self._find(ask, key) if kept is None else await self._unseen(ask, key)
        finally:
            self._coming.discard(key)

    def _kept(self, key: Key) -> SessionView | None:
        """What is kept of it here. One that only the book has was taken by another gateway, or could not be saved."""
        if not self._book.has(key):
            return None
        kept = self._engine.session(self._book.name(key))
        if kept is None:
            self._book.drop(key)
        return kept

    async def _unseen(self, ask: Ask, key: Key) -> int:
        """It is kept here, and on no server: another gateway that was asked for it meanwhile found it nowhere."""
        try:
            where = await self._heard(ask, key, self._clock())
        except Elsewhere:
            self._book.drop(key)
            raise
        return where.epoch.counter if self._kept(key) is None else 0

    async def _find(self, ask: Ask, key: Key) -> int:
        begun = self._clock()
        deadline = begun + PATIENCE
        while True:
            where = await self._heard(ask, key, begun)
            if not where.holders:
                if where.unheard and ask.after is not None:
                    raise _unknown()
                return where.epoch.counter
            if where.wait <= 0:
                if await self._engine.adopt(where, key[0], partial(_check, where, ask)):
                    self._book.adopted(key, where.session)
                    return where.epoch.counter
                where = await self._alone(ask, key, deadline)
                if self._clock() >= deadline:
                    return where.epoch.counter
                await asyncio.sleep(LOOK_AGAIN / 10)
            else:
                await self._wait(where, deadline)

    async def _heard(self, ask: Ask, key: Key, begun: float) -> Whereabouts:
        """What all servers know that may know it; for a while those that are silent or cut off are asked again."""
        while True:
            where = await self._alone(ask, key, begun + PATIENCE)
            if not where.unheard or self._clock() >= begun + ASK_AGAIN:
                return where
            await asyncio.sleep(LOOK_AGAIN / 10)

    async def _alone(self, ask: Ask, key: Key, deadline: float) -> Whereabouts:
        """What the servers know, when no gateway that lives has it, and no other one is about to open it."""
        opens = True
        while True:
            asked = self._clock()
            where = await self._engine.find(wire_name(key), key[0], opens)
            if where.living:
                raise _at(where, ask)
            if opens and not where.opener and self._clock() - asked <= LOOK_AGAIN:
                return where
            if self._clock() >= deadline:
                detail = "another gateway is about to open this session"
                raise ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
            opens = (
                not where.opener
            )  # if another one is before us, it has it in a moment, or comes to nothing
            if where.opener:
                await asyncio.sleep(random.uniform(0.5, 1.5) * LOOK_AGAIN / 10)

    async def _wait(self, where: Whereabouts, deadline: float) -> None:
        """The gateway that had it may come back until its lease is over."""
        if self._clock() + where.wait > deadline:
            detail = "the gateway that held this session is gone; it can be taken over later"
            raise ApiError(Code.SESSION_ELSEWHERE, detail, retry_after=where.wait)
        await asyncio.sleep(min(where.wait + 0.01, LOOK_AGAIN))


def _check(where: Whereabouts, ask: Ask, log: Sequence[int]) -> None:
    """Raises ApiError if who resumes has read another log than this one, or more of it."""
    if ask.after is None or not ask.mark:
        return
    try:
        check_mark(log, ask.after, ask.mark)
    except ApiError as error:
        raise (_unknown() if where.unheard else error) from error


def _unknown() -> ApiError:
    detail = "not all servers that may know this session can be reached; go on with Last-Event-ID"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)


def _at(where: Whereabouts, ask: Ask) -> Exception:
    if where.target and not ask.forwarded:
        return Elsewhere(where.target)
    detail = "another gateway holds this session"
    if not where.target:
        detail += ", and does not say where it can be reached (--advertise)"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
