"""Locates a named session: kept here, taken over from a lost gateway, owned by another one, or new (R20, takeover).

Used by the service before a turn of a named session begins. Decides which gateway answers. Knows neither the steps of
a takeover nor text.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial

from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.core.interface.views import SessionView
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey, wire_name
from modelswarm_gateway.generation.request import GenerationRequest

# Seconds that a request waits for a lease to end: two leases of the default length.
WAIT_SECONDS = 60.0
# Longest age of an answer that counts, and longest pause while a lease ends, in seconds.
POLL_SECONDS = 1.0
# Names that are searched for at a time: each search asks all servers of a model. Those that wait for a lease to end do
# not count, as all sessions of a lost gateway may. However many wait, they ask as often as so many names would.
MAX_SEARCHES = 256
# Seconds for which servers that do not answer are asked again.
UNREACHED_SECONDS = 3.0

CheckLog = Callable[[ParkedTurn], object]


class OwnedElsewhere(Exception):
    """Another running gateway owns the session; `http` and `grpc` are its addresses."""

    def __init__(self, target: str) -> None:
        super().__init__(f"the session is at {target}")
        self.http, _, self.grpc = target.partition(",")


class SessionLocator:
    def __init__(
        self, backend: SessionBackend, named_sessions: NamedSessions, clock: Callable[[], float]
    ) -> None:
        self._backend, self._named_sessions, self._clock = backend, named_sessions, clock
        self._in_progress: set[SessionKey] = set()
        self._lookups = 0  # searches for clients that begin no turn
        self._waiting = 0  # of those in progress, that wait for a lease to end

    async def find(self, key: SessionKey) -> SessionLocation:
        """Return what the servers know of a session, whose name is not claimed. Raise ApiError."""
        self._check_place()
        self._lookups += 1
        try:
            return await self._backend.find_session(wire_name(key), key[0])
        finally:
            self._lookups -= 1

    def _check_place(self) -> None:
        if len(self._in_progress) - self._waiting + self._lookups >= MAX_SEARCHES:
            detail = f"{MAX_SEARCHES} named sessions are being searched for already; retry in 1 s"
            raise ApiError(Code.NO_CAPACITY, detail, param="session_id", retry_after=1.0)

    async def acquire(self, request: GenerationRequest, key: SessionKey, check: CheckLog) -> int:
        """Return once a turn may begin here: the highest epoch that a session of that name has reached.

        `check` raises ApiError if the log of a lost gateway's session is not the one that the request resumes.
        Raise OwnedElsewhere, or ApiError if the session cannot be acquired now.
        """
        if self._named_sessions.is_busy(key):
            return 0
        kept = self._kept(key)
        if kept is not None and kept.is_reachable:
            return 0
        if key in self._in_progress:
            raise self._named_sessions.busy_error(key)
        self._check_place()
        self._in_progress.add(key)
        try:
            return (
                await self._search(request, key, check)
                if kept is None
                else await self._recheck_kept(request, key, check)
            )
        finally:
            self._in_progress.discard(key)

    def _kept(self, key: SessionKey) -> SessionView | None:
        """Return the kept session. Drop one that the core has lost: it was taken over, or its recovery failed."""
        if not self._named_sessions.has_session(key):
            return None
        kept = self._backend.session(self._named_sessions.session_name(key))
        if kept is None:
            self._named_sessions.drop_session(key)
        return kept

    async def _recheck_kept(
        self, request: GenerationRequest, key: SessionKey, check: CheckLog
    ) -> int:
        """Search for a kept session that is on no reachable server: another gateway may have opened the name anew."""
        try:
            location = await self._query_servers(request, key, self._clock())
        except OwnedElsewhere:
            self._named_sessions.drop_session(key)
            raise
        kept = self._kept(key)
        if location.unanswered and (request.append or request.resume_after is not None):
            raise _servers_unreached()
        if kept is None or location.last_started > kept.newest_run_epoch:
            self._named_sessions.drop_session(key)  # it ran elsewhere since: that log is newer
            return await self._search(request, key, check)
        self._backend.raise_epoch(kept.session, location.epoch.counter)
        return 0

    async def _search(self, request: GenerationRequest, key: SessionKey, check: CheckLog) -> int:
        started_at = self._clock()
        deadline = started_at + WAIT_SECONDS
        while True:
            location = await self._query_servers(request, key, started_at)
            if location.takeover_wait > 0:
                await self._await_lease_end(location, deadline)
                continue
            if not location.log_holders:
                if location.unanswered and (request.append or request.resume_after is not None):
                    raise _servers_unreached()
                return location.epoch.counter
            if await self._backend.take_over(
                location, key[0], partial(_check_log, location, check)
            ):
                taken = self._backend.parked_turn(location.session)
                ttl = taken.turn.session_ttl if taken else 0
                self._named_sessions.add_idle(key, location.session, ttl)
                return location.epoch.counter
            location = await self._await_no_owner(request, key, deadline)
            if self._clock() >= deadline:
                return location.epoch.counter
            await asyncio.sleep(POLL_SECONDS / 10)

    async def _query_servers(
        self, request: GenerationRequest, key: SessionKey, started_at: float
    ) -> SessionLocation:
        """Ask all servers of the model. For UNREACHED_SECONDS, ask again while some do not answer."""
        while True:
            location = await self._await_no_owner(request, key, started_at + WAIT_SECONDS)
            if not location.unanswered or self._clock() >= started_at + UNREACHED_SECONDS:
                return location
            await asyncio.sleep(POLL_SECONDS / 10)

    async def _await_no_owner(
        self, request: GenerationRequest, key: SessionKey, deadline: float
    ) -> SessionLocation:
        """Ask all servers until no running gateway owns the session and no other gateway has claimed its name."""
        claims = True
        while True:
            asked_at = self._clock()
            location = await self._backend.find_session(wire_name(key), key[0], claims)
            if location.is_owner_alive:
                raise _owned_elsewhere(location, request)
            if claims and not location.claimant and self._clock() - asked_at <= POLL_SECONDS:
                return location
            if self._clock() >= deadline:
                detail = "another gateway is about to open this session"
                raise ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
            # Another claimant either owns the session in a moment or gives up: do not claim meanwhile.
            claims = not location.claimant
            if location.claimant:
                await asyncio.sleep(random.uniform(0.5, 1.5) * POLL_SECONDS / 10)

    async def _await_lease_end(self, location: SessionLocation, deadline: float) -> None:
        """Sleep for a part of the owner's lease: until it ends, the owner may come back."""
        if self._clock() + location.takeover_wait > deadline:
            detail = "the gateway that owned this session was lost; it can be taken over later"
            raise ApiError(Code.SESSION_ELSEWHERE, detail, retry_after=location.takeover_wait)
        self._waiting += 1
        try:
            pause = POLL_SECONDS * max(1.0, self._waiting / MAX_SEARCHES)
            apart = random.uniform(0.0, pause - POLL_SECONDS)  # their leases end together
            await asyncio.sleep(min(location.takeover_wait + 0.01 + apart, pause))
        finally:
            self._waiting -= 1


def _check_log(location: SessionLocation, check: CheckLog, found: ParkedTurn) -> None:
    """Raise ApiError if this log is not the one that the request resumes: a server may have a newer one."""
    try:
        check(found)
    except ApiError as error:
        raise (_servers_unreached() if location.unanswered else error) from error


def _servers_unreached() -> ApiError:
    detail = "not all servers that may hold this session can be reached; repeat the request in 1 s"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)


def _owned_elsewhere(location: SessionLocation, request: GenerationRequest) -> Exception:
    if location.owner_target and not request.forwarded:
        return OwnedElsewhere(location.owner_target)
    detail = "another gateway holds this session"
    if not location.owner_target:
        detail += ", and does not advertise its address (--advertise)"
    return ApiError(Code.SESSION_ELSEWHERE, detail, param="session_id", retry_after=1.0)
