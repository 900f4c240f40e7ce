"""Leader election by a Lease. Our own, because the client library's election keeps leading when its process hangs.

Used by `app`: `acquire`, then `renew_until_lost` beside everything else; when that returns, the process must end at
once. `seconds_to_write` is the fence before every write. No timestamp of another machine is ever compared with a
clock. A candidate measures, by its own monotonic clock, for how long the Lease has not changed. The holder stops two
seconds before a candidate may begin, counted from when its last successful renewal was *sent*. Knows no swarm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from modelswarm.errors import ModelSwarmError
from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import ConflictError, KubeError, NotFoundError
from modelswarm_operator.kube.resources import LEASE
from modelswarm_operator.reconcile.state.observed import Json

log = logging.getLogger(__name__)
Clock = Callable[[], float]


class LeaseLostError(ModelSwarmError):
    """A write was stopped because this process may no longer be the leader."""


@dataclass(frozen=True, slots=True)
class LeaseTimings:
    """Times in seconds."""

    duration: float = 8.0  # a Lease unchanged for this long is free
    margin: float = 2.0  # the holder stops this much earlier
    renew: float = 2.0
    poll: float = 1.0
    call: float = 2.0  # for one request


class LeaseExpiry:
    """Measures for how long a candidate has seen the same Lease. Pure, so that it is tested in virtual time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._version = ""
        self._since = 0.0

    def has_expired(self, lease: Json, me: str) -> bool:
        now, version, spec = self._clock(), lease["metadata"]["resourceVersion"], _spec(lease)
        if spec.get("holderIdentity") in (None, "", me):
            return True  # released, or taken by our own request whose response was lost
        if version != self._version:
            self._version, self._since = version, now
        return now - self._since >= float(spec.get("leaseDurationSeconds") or 0)


class Lease:
    def __init__(
        self,
        client: KubeClient,
        namespace: str,
        name: str,
        identity: str,
        timings: LeaseTimings | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._client = client
        self._collection_path = LEASE.path(namespace)
        self._path = LEASE.path(namespace, name)
        self._name = name
        self._identity = identity
        self._timings = timings or LeaseTimings()
        self._clock = clock
        self._lease: Json = {}
        self._deadline = 0.0

    @property
    def is_held(self) -> bool:
        return self._clock() < self._deadline

    def seconds_to_write(self) -> float:
        """Return the seconds until the lease ends: no write may take longer. Raises LeaseLostError if it has ended."""
        left = self._deadline - self._clock()
        if left <= 0:
            raise LeaseLostError("the lease ran out before a write: another operator may lead")
        return left

    async def acquire(self) -> None:
        """Return when this process leads; there is no deadline."""
        expiry, last_message = LeaseExpiry(self._clock), ""
        while True:
            try:
                if await self._try_acquire(expiry):
                    log.info("leading as %s", self._identity)
                    return
                last_message = self._log_change(
                    last_message, f"standing by: {_spec(self._lease).get('holderIdentity')} leads"
                )
            except ConflictError:
                last_message = self._log_change(
                    last_message, "standing by: another candidate took the lease"
                )
            except (KubeError, TimeoutError) as error:
                why = str(error) or "deadline exceeded"
                last_message = self._log_change(
                    last_message, f"standing by: the lease cannot be read or taken: {why}"
                )
            await asyncio.sleep(self._timings.poll)

    def _log_change(self, last_message: str, message: str) -> str:
        if message != last_message:
            log.info(message)
        return message

    async def _try_acquire(self, expiry: LeaseExpiry) -> bool:
        async with asyncio.timeout(2 * self._timings.call):
            try:
                self._lease = await self._client.get(self._path)
            except NotFoundError:
                await self._create()
                return True
            if not expiry.has_expired(self._lease, self._identity):
                return False
            await self._write(self._identity, transitions=1)
            return True

    async def _create(self) -> None:
        sent, body = self._clock(), {"metadata": {"name": self._name}, "spec": self._new_spec(0)}
        self._lease = await self._client.send(
            "POST", self._collection_path, _typed(body), self._timings.call
        )
        self._extend_deadline(sent)

    async def renew_until_lost(self) -> None:
        """Renew the Lease; return when that fails for too long or another process holds it."""
        pause = self._timings.renew
        while self.is_held:
            await asyncio.sleep(min(pause, max(0.0, self._deadline - self._clock())))
            pause = self._timings.renew if self.is_held and await self._try_renew() else 0.25
        log.error("the lease is lost: this process ends at once")

    async def _try_renew(self) -> bool:
        """Renew once; return False if it failed and is to be retried while there is time."""
        try:
            async with asyncio.timeout(min(self._timings.call, self._deadline - self._clock())):
                await self._renew()
        except (KubeError, TimeoutError) as error:
            log.warning("the lease could not be renewed: %s", str(error) or "deadline exceeded")
            return False
        return True

    async def _renew(self) -> None:
        try:
            await self._write(self._identity, transitions=0)
        except NotFoundError:
            await (
                self._create()
            )  # it was deleted; if another candidate created it first, that is a conflict
        except ConflictError:
            self._lease = await self._client.get(self._path)
            if _spec(self._lease).get("holderIdentity") != self._identity:
                self._deadline = 0.0
                return
            await self._write(self._identity, transitions=0)  # it was edited by hand

    async def release(self) -> None:
        """Release the Lease on a graceful stop, so that the next candidate need not wait. Failure is harmless."""
        if not self.is_held:
            return
        self._deadline = 0.0  # no write is allowed from here on, even if the request fails
        try:
            async with asyncio.timeout(1.0):
                await self._clear_holder()
        except (KubeError, TimeoutError) as error:
            log.warning("the lease could not be released: %s", str(error) or "deadline exceeded")
        self._deadline = 0.0

    async def _clear_holder(self) -> None:
        """Clear the holder. A renewal that was cancelled may have been stored: then the Lease is read again."""
        while True:
            try:
                await self._write("", transitions=0)
                return
            except ConflictError:
                self._lease = await self._client.get(self._path)
                if _spec(self._lease).get("holderIdentity") != self._identity:
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
        self._lease = await self._client.send("PUT", self._path, body, self._timings.call)
        self._extend_deadline(sent)

    def _extend_deadline(self, sent: float) -> None:
        self._deadline = sent + self._timings.duration - self._timings.margin

    def _new_spec(self, transitions: int) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # for users; never compared
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": int(self._timings.duration),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }


def _spec(lease: Json) -> dict[str, Any]:
    return lease.get("spec") or {}


def _typed(body: Json) -> Json:
    return {"apiVersion": LEASE.api_version, "kind": LEASE.kind, **body}
