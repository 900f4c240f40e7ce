"""Kubernetes Events on swarms, as `kubectl describe` shows them.

Used by `executor`. The core records transitions only; here an equal Event is not repeated within ten minutes and no
swarm writes more than a burst. An Event that cannot be written is logged and dropped: nothing depends on it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import UTC, datetime

from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import KubeError
from modelswarm_operator.kube.resources import EVENT, FIELD_MANAGER, SWARM
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.actions import RecordEvent
from modelswarm_operator.reconcile.state.observed import Json, SwarmView

log = logging.getLogger(__name__)
REPEAT_SECONDS = 600.0  # before an equal Event is written again
BURST = 25  # Events per swarm
REFILL_SECONDS = 10.0  # per further Event beyond the burst
MAX_REMEMBERED = 4096  # Events and swarms
MAX_NOTE_BYTES = 1024  # the API server's limit


class EventLimiter:
    """Decides which Events may be written now: a token bucket per swarm, and no repetitions. Pure."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_recorded: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        self._budgets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def try_acquire(self, uid: str, reason: str, message: str) -> bool:
        now, key = self._clock(), (uid, reason, message)
        last = self._last_recorded.get(key)
        if last is not None and now - last < REPEAT_SECONDS:
            return False
        left, since = self._budgets.get(uid, (float(BURST), now))
        left = min(float(BURST), left + (now - since) / REFILL_SECONDS)
        allowed = left >= 1.0
        self._budgets[uid] = (left - 1.0 if allowed else left, now)
        if allowed:
            self._last_recorded[key] = now
        for memory in (self._last_recorded, self._budgets):
            while len(memory) > MAX_REMEMBERED:
                memory.popitem(last=False)
        return allowed


class EventRecorder:
    def __init__(self, client: KubeClient, instance: str) -> None:
        self._client = client
        self._instance = instance[:128]
        self._limit = EventLimiter(time.monotonic)

    async def record(self, swarm: SwarmView, event: RecordEvent) -> None:
        log.info("%s/%s: %s: %s", swarm.namespace, swarm.name, event.reason, event.message)
        if not self._limit.try_acquire(swarm.uid, event.reason, event.message):
            return
        try:
            await self._client.post(EVENT.path(swarm.namespace), self._body(swarm, event))
        except KubeError as error:
            log.warning(
                "an Event on %s/%s could not be written: %s", swarm.namespace, swarm.name, error
            )

    def _body(self, swarm: SwarmView, event: RecordEvent) -> Json:
        regarding = {
            "apiVersion": SWARM.api_version,
            "kind": SWARM.kind,
            "name": swarm.name,
            "namespace": swarm.namespace,
            "uid": swarm.uid,
        }
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {
                "name": f"{swarm.name}.{secrets.token_hex(8)}",
                "namespace": swarm.namespace,
            },
            "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "type": event.kind,
            "reason": event.reason,
            "action": event.reason,
            "note": event.message.encode()[:MAX_NOTE_BYTES].decode(errors="ignore"),
            "regarding": regarding,
            "reportingController": f"{names.DOMAIN}/{FIELD_MANAGER}",
            "reportingInstance": self._instance,
        }
