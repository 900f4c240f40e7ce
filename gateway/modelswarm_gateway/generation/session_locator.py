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

from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.interface.session_search import Whereabouts
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey, wire_name
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import check_mark

WAIT_SECONDS = 60.0  # seconds that a request waits for a lease to end: two of the usual ones
POLL_SECONDS = 1.0
UNREACHED_SECONDS = 3.0  # seconds for which servers that are silent or cut off are asked again


class OwnedElsewhere(Exception):
    """A gateway that lives has the session; `http` and `grpc` are its doors."""

    def __init__(self, target: str) -> None:
        super().__init__(f"the session is at {target}")
        self.http, _, self.grpc = target.partition(",")


class SessionLocator:
    def __init__(
        self, backend: SessionBackend, named_sessions: NamedSessions, clock: Callable[[], float]
    ) -> None:
        self._backend, self._named_sessions, self._clock = backend, named_sessions, clock
        self._in_progress: set[SessionKey] = set()

    async def acquire(self, ask: GenerationRequest, key: SessionKey) -> int:
        """Returns when a turn may begin here, with the epoch that a session of that name has reached.

        Raises Elsewhere, or ApiError when it cannot be had now.
        """
        if self._named_sessions.is_busy(key):
            return 0
        kept = self._kept(key)
        if kept is not None and kept.seen:
            return 0
        if key in self._in_progress:
            raise self._named_sessions.busy_error(key)
        self._in_progress.add(key)
        try:
            return (
                await self._search(ask, key) if kept is None else await self._recheck_kept(ask, key)
            )
        finally:
            self._in_progress.discard(key)

    def _kept(self, key: SessionKey) -> SessionView | None:
        """What is kept of it here. One that only the book has was taken by another gateway, or could not be saved."""
        if not self._named_sessions.has_session(key):
            return None
        kept = self._backend.session(self._named_sessions.session_name(key))
        if kept is None:
            self._named_sessions.drop_session(key)
        return kept

    async def _recheck_kept(self, ask: GenerationRequest, key: SessionKey) -> int:
        """It is kept here, and on no server: another gateway that was asked for it meanwhile found it nowhere."""
        try:
            where = await self._query_servers(ask, key, self._clock())
        except OwnedElsewhere:
            self._named_sessions.drop_session(key)
            raise
        return where.epoch.counter if self._kept(key) is None else 0

    async def _search(self, ask: GenerationRequest, key: SessionKey) -> int:
        begun = self._clock()
        deadline = begun + WAIT_SECONDS
        while True:
            where = await self._query_servers(ask, key, begun)
            if not where.holders:
                if where.unheard and ask.resume_after is not None:
                    raise _servers_unreached()
                return where.epoch.counter
            if where.wait <= 0:
                if await self._backend.take_over(where, key[0], partial(_check_log, where, ask)):
                    self._named_sessions.add_idle(key, where.session)
                    return where.epoch.counter
                where = await self._await_no_owner(ask, key, deadline)
                if self._clock() >= deadline:
                    return where.epoch.counter
                await asyncio.sleep(POLL_SECONDS / 10)
            else:
                await self._await_lease_end(where, deadline)

    async def _query_servers(
        self, ask: GenerationRequest, key: SessionKey, begun: float
    ) -> Whereabouts:
        """What all servers know that may know it; for a while those that are silent or cut off are asked again."""
        while True:
            where = await self._await_no_owner(ask, key, begun + WAIT_SECONDS)
            if not where.unheard or self._clock() >= begun + UNREACHED_SECONDS:
                return where
            await asyncio.sleep(POLL_SECONDS / 10)

    async def _await_no_owner(
        self, ask: GenerationRequest, key: SessionKey, deadline: float
    ) -> Whereabouts:
        """What the servers know, when no gateway that lives has it, and no other one is about to open it."""
        opens = True
        while True:
            asked = self._clock()
            where = await self._backend.find_session(wire_name(key), key[0], opens)
            if where.living:
                raise _owned_elsewhere(where, ask)
            if opens and not where.opener and self._clock() - asked <= POLL_SECONDS:
                return where
            if self._clock() >= deadline:
                detail = "another gateway is about to open this session"
                raise ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
            opens = (
                not where.opener
            )  # if another one is before us, it has it in a moment, or comes to nothing
            if where.opener:
                await asyncio.sleep(random.uniform(0.5, 1.5) * POLL_SECONDS / 10)

    async def _await_lease_end(self, where: Whereabouts, deadline: float) -> None:
        """The gateway that had it may come back until its lease is over."""
        if self._clock() + where.wait > deadline:
            detail = "the gateway that held this session is gone; it can be taken over later"
            raise ApiError(Code.SESSION_ELSEWHERE, detail, retry_after=where.wait)
        await asyncio.sleep(min(where.wait + 0.01, POLL_SECONDS))


def _check_log(where: Whereabouts, ask: GenerationRequest, log: Sequence[int]) -> None:
    """Raises ApiError if who resumes has read another log than this one, or more of it."""
    if ask.resume_after is None or not ask.resume_mark:
        return
    try:
        check_mark(log, ask.resume_after, ask.resume_mark)
    except ApiError as error:
        raise (_servers_unreached() if where.unheard else error) from error


def _servers_unreached() -> ApiError:
    detail = "not all servers that may know this session can be reached; go on with Last-Event-ID"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)


def _owned_elsewhere(where: Whereabouts, ask: GenerationRequest) -> Exception:
    if where.target and not ask.forwarded:
        return OwnedElsewhere(where.target)
    detail = "another gateway holds this session"
    if not where.target:
        detail += ", and does not say where it can be reached (--advertise)"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
