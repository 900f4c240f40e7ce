"""Which of several operators acts: a Lease of our own, because the client's election goes on leading when it hangs.

Used by `main`: `acquire`, then `keep` beside everything else; when `keep` ends, the process must end at once. `check`
is the fence before every write. No timestamp of another machine is ever compared with a clock: a candidate measures,
by its own monotonic clock, for how long the Lease has not changed. The holder stops two seconds before a candidate
may begin, counted from when its last successful renewal was *sent*.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from modelswarm_operator.kube.client import Api
from modelswarm_operator.kube.errors import ApiError, ConflictError, LeaseLostError, NotFoundError
from modelswarm_operator.kube.resources import LEASE
from modelswarm_operator.reconcile.state.observed import Json

log = logging.getLogger(__name__)
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Terms:
    """Seconds."""

    duration: float = 8.0  # a Lease unchanged for this long is free
    margin: float = 2.0  # the holder stops this much earlier
    renew: float = 2.0
    poll: float = 1.0
    call: float = 2.0  # for one request


class Patience:
    """How long a candidate has seen the same Lease: pure, so that it can be tested in virtual time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._version = ""
        self._since = 0.0

    def may_take(self, lease: Json, me: str) -> bool:
        now, version, spec = self._clock(), lease["metadata"]["resourceVersion"], _spec(lease)
        if spec.get("holderIdentity") in (None, "", me):
            return True  # released, or our own request whose answer was lost
        if version != self._version:
            self._version, self._since = version, now
        return now - self._since >= float(spec.get("leaseDurationSeconds") or 0)


class Lease:
    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        me: str,
        terms: Terms | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._api = api
        self._all = LEASE.path(namespace)
        self._path = LEASE.path(namespace, name)
        self._name = name
        self._me = me
        self._terms = terms or Terms()
        self._clock = clock
        self._lease: Json = {}
        self._deadline = 0.0

    @property
    def held(self) -> bool:
        return self._clock() < self._deadline

    def check(self) -> None:
        if not self.held:
            raise LeaseLostError("the lease ran out before a write: another operator may lead")

    async def acquire(self) -> None:
        """Returns when this process leads; waits as long as it takes."""
        patience, told = Patience(self._clock), ""
        while True:
            try:
                if await self._try_to_take(patience):
                    log.info("leading as %s", self._me)
                    return
                told = self._tell(
                    told, f"standing by: {_spec(self._lease).get('holderIdentity')} leads"
                )
            except ConflictError:
                told = self._tell(told, "standing by: another candidate was faster")
            except (ApiError, TimeoutError) as error:
                why = str(error) or "no answer in time"
                told = self._tell(told, f"standing by: the lease cannot be read or taken: {why}")
            await asyncio.sleep(self._terms.poll)

    def _tell(self, told: str, news: str) -> str:
        if news != told:
            log.info(news)
        return news

    async def _try_to_take(self, patience: Patience) -> bool:
        async with asyncio.timeout(2 * self._terms.call):
            try:
                self._lease = await self._api.get(self._path)
            except NotFoundError:
                await self._create()
                return True
            if not patience.may_take(self._lease, self._me):
                return False
            await self._write(self._me, transitions=1)
            return True

    async def _create(self) -> None:
        sent, body = self._clock(), {"metadata": {"name": self._name}, "spec": self._new_spec(0)}
        self._lease = await self._api.send("POST", self._all, _typed(body), self._terms.call)
        self._hold(sent)

    async def keep(self) -> None:
        """Renews until that fails for too long or somebody else holds it; returns only then."""
        pause = self._terms.renew
        while self.held:
            await asyncio.sleep(min(pause, max(0.0, self._deadline - self._clock())))
            pause = self._terms.renew if self.held and await self._renewed() else 0.25
        log.error("the lease is lost: this process ends at once")

    async def _renewed(self) -> bool:
        """False: to be tried again while there is time."""
        try:
            async with asyncio.timeout(min(self._terms.call, self._deadline - self._clock())):
                await self._renew()
        except (ApiError, TimeoutError) as error:
            log.warning("the lease could not be renewed: %s", str(error) or "no answer in time")
            return False
        return True

    async def _renew(self) -> None:
        try:
            await self._write(self._me, transitions=0)
        except NotFoundError:
            await self._create()  # somebody deleted it; if another was faster, that is a conflict
        except ConflictError:
            self._lease = await self._api.get(self._path)
            if _spec(self._lease).get("holderIdentity") != self._me:
                self._deadline = 0.0
                return
            await self._write(self._me, transitions=0)  # somebody edited it

    async def release(self) -> None:
        """On a graceful stop: the next candidate need not wait. If it fails, it waits."""
        if not self.held:
            return
        self._deadline = 0.0  # nothing is written from here on, whatever becomes of the request
        try:
            async with asyncio.timeout(1.0):
                await self._let_go()
        except (ApiError, TimeoutError) as error:
            log.warning("the lease could not be released: %s", str(error) or "no answer in time")
        self._deadline = 0.0

    async def _let_go(self) -> None:
        """A renewal that was under way when `keep` was cancelled may have come through: then there is a newer Lease."""
        while True:
            try:
                await self._write("", transitions=0)
                return
            except ConflictError:
                self._lease = await self._api.get(self._path)
                if _spec(self._lease).get("holderIdentity") != self._me:
                    return

    async def _write(self, holder: str, transitions: int) -> None:
        sent = self._clock()
        old = _spec(self._lease)
        spec = {**old, **self._new_spec(int(old.get("leaseTransitions") or 0) + transitions)}
        spec["acquireTime"] = spec["acquireTime"] if transitions else old.get("acquireTime")
        spec["holderIdentity"] = holder
        meta = {
            key: self._lease["metadata"][key] for key in ("name", "namespace", "resourceVersion")
        }
        body = _typed({"metadata": meta, "spec": spec})
        self._lease = await self._api.send("PUT", self._path, body, self._terms.call)
        self._hold(sent)

    def _hold(self, sent: float) -> None:
        self._deadline = sent + self._terms.duration - self._terms.margin

    def _new_spec(self, transitions: int) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for people; nobody compares it
        return {
            "holderIdentity": self._me,
            "leaseDurationSeconds": int(self._terms.duration),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _spec(lease: Json) -> dict[str, Any]:
    return lease.get("spec") or {}


def _typed(body: Json) -> Json:
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, **body}
