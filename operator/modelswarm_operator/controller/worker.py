"""One supervised task per swarm: it sleeps, is woken, takes a turn, and never dies of what goes wrong in one.

Started by `main` while this process leads. A turn looks at the cache, asks the pure core what to do and has it carried
out. Turns of one swarm follow each other, turns of different swarms overlap up to a bound. Knows no Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from modelswarm_operator.controller.executor import Apply
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.resync import Resync
from modelswarm_operator.kube.errors import ApiError, ConflictError, LeaseLostError, ThrottledError
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.state.observed import Decision, DeleteChild, DeletePod, Observed

log = logging.getLogger(__name__)

DEBOUNCE = 0.05  # events come in groups
AT_ONCE = 16  # turns
TURN_SECONDS = 120.0
PATIENCE = 8  # turns in a row that changed something before they are spaced out
FIRST = 0.1  # pause after a failing turn, doubled with every further one ...
LONGEST = 60.0  # ... up to this
CONFLICT = 1.0  # or this, if it failed because others write too
FOREVER = 1e9

Decide = Callable[[Observed, float], Decision]


@dataclass(slots=True)
class Sleeper:
    """What one swarm's task waits for."""

    event: asyncio.Event = field(default_factory=asyncio.Event)
    wake_at: float = 0.0  # monotonic
    woken_at: float = 0.0
    started: bool = False
    failures: int = 0
    deaf: bool = False  # waits for `relent` or the time, not for events
    relent: asyncio.Event = field(default_factory=asyncio.Event)  # the API server answers again
    throttled: bool = False  # it said for how long
    busy: int = 0  # turns in a row that did something
    doubtful: bool = False  # the last turn's writes may or may not have happened


class Turns:
    def __init__(
        self, cache: Cache, apply: Apply, resync: Resync, decide: Decide, metrics: Metrics
    ) -> None:
        self._cache = cache
        self._apply = apply
        self._resync = resync
        self._decide = decide
        self._metrics = metrics
        self._sleepers: dict[str, Sleeper] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._known = asyncio.Event()
        self._in_turn: dict[str, float] = {}
        self._stopping = asyncio.Event()

    @property
    def oldest_turn(self) -> float:
        """Seconds that the longest of the running turns has taken."""
        now = time.monotonic()
        return max((now - since for since in self._in_turn.values()), default=0.0)

    def wake(self, uids: Iterable[str]) -> None:
        now = time.monotonic()
        for uid in uids:
            sleeper = self._sleepers.get(uid)
            if sleeper is None:
                sleeper = self._sleepers[uid] = Sleeper()
                self._known.set()
            sleeper.woken_at = sleeper.woken_at or now
            sleeper.event.set()

    def look_again(self, uids: Iterable[str], within: float) -> None:
        """As `wake`, spread over so many seconds."""
        loop = asyncio.get_running_loop()
        for uid in uids:
            loop.call_later(random.uniform(0.0, within), self.wake, (uid,))

    def relent(self) -> None:
        """The API server answers: who waits because it did not need not wait longer."""
        for sleeper in self._sleepers.values():
            if sleeper.failures and not sleeper.throttled:
                sleeper.relent.set()
                sleeper.event.set()

    async def run(self) -> None:
        """Until stopped. Raises LeaseLostError; nothing else ends it."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                await self._known.wait()
                self._known.clear()
                for uid, sleeper in list(self._sleepers.items()):
                    if not sleeper.started:
                        sleeper.started = True
                        group.create_task(self._live(uid, sleeper), name=f"swarm {uid}")

    def stop(self) -> None:
        """Turns that run are finished; no other begins."""
        self._stopping.set()
        self._known.set()
        for sleeper in self._sleepers.values():
            sleeper.event.set()
            sleeper.relent.set()

    async def _live(self, uid: str, sleeper: Sleeper) -> None:
        while not self._stopping.is_set():
            await self._sleep(sleeper)
            if self._stopping.is_set() or self._cache.swarms.get(uid) is None:
                break
            async with self._room:
                if self._stopping.is_set():
                    break
                self._metrics.wait_seconds.observe(self._waited(sleeper))
                await self._take_turn(uid, sleeper)
        if self._sleepers.get(uid) is sleeper:
            del self._sleepers[uid]

    def _waited(self, sleeper: Sleeper) -> float:
        woken, sleeper.woken_at = sleeper.woken_at, 0.0
        return max(0.0, time.monotonic() - woken) if woken else 0.0

    async def _sleep(self, sleeper: Sleeper) -> None:
        """Until something happens or it is time. While the API server fails, events do not shorten the wait."""
        signal = sleeper.relent if sleeper.deaf else sleeper.event
        pause = sleeper.wake_at - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, pause) if pause < FOREVER else None):
                await signal.wait()
                await asyncio.sleep(DEBOUNCE)
        except TimeoutError:
            pass  # it is time
        sleeper.event.clear()
        sleeper.relent.clear()

    async def _take_turn(self, uid: str, sleeper: Sleeper) -> None:
        started, result = time.monotonic(), "failed"
        self._in_turn[uid] = started
        try:
            async with asyncio.timeout(TURN_SECONDS):
                decision = await self._turn(uid, sleeper)
            result = "changed" if decision is not None and decision.actions else "quiet"
            sleeper.failures, sleeper.doubtful, sleeper.deaf = 0, False, False
            self._plan_next(sleeper, decision)
        except LeaseLostError:
            raise
        except ConflictError as error:
            result = "conflict"
            self._again(uid, sleeper, error, at_most=CONFLICT)
        except ThrottledError as error:
            result = "throttled"
            self._again(uid, sleeper, error, at_least=min(error.retry_after, LONGEST))
            sleeper.throttled = True
        except (ApiError, TimeoutError) as error:
            self._again(uid, sleeper, error)
        except Exception as error:  # a fault of ours: said in full, and the swarm is not left alone
            result = "fault"
            log.exception("swarm %s: a turn failed by a fault of ours", uid)
            self._again(uid, sleeper, error)
            sleeper.deaf = False  # a new spec may be one that we can deal with
        finally:
            del self._in_turn[uid]
            self._metrics.turn_seconds.labels(result).observe(time.monotonic() - started)

    async def _turn(self, uid: str, sleeper: Sleeper) -> Decision | None:
        """Decided and carried out on one view of the world; None: the swarm is gone."""
        fresh = sleeper.doubtful
        observed = await self._looked(uid, fresh)
        if observed is None:
            return None
        decision = self._decide(observed, time.time())
        if not fresh and _destroys(decision):  # never on what events alone said
            observed = await self._looked(uid, True)
            if observed is None:
                return None
            decision = self._decide(observed, time.time())
        if decision.actions:
            await self._apply.carry_out(observed.swarm, decision.actions)
        return decision

    async def _looked(self, uid: str, anew: bool) -> Observed | None:
        observed = self._cache.observed(uid)
        if observed is None or not anew:
            return observed
        self.wake(await self._resync.one(observed.swarm) - {uid})
        return self._cache.observed(uid)

    def _plan_next(self, sleeper: Sleeper, decision: Decision | None) -> None:
        """What a turn did is looked at again at once, until there is nothing left to do."""
        now = time.monotonic()
        if decision is None:
            sleeper.wake_at = now  # the swarm is gone: its task sees that and ends
            return
        sleeper.busy = sleeper.busy + 1 if decision.actions else 0
        wait = float("inf")
        if decision.wake_at is not None:
            wait = max(DEBOUNCE, decision.wake_at - time.time())
        if sleeper.busy:
            wait = min(wait, DEBOUNCE * 2.0 ** min(max(0, sleeper.busy - PATIENCE), 20))
        sleeper.wake_at = now + wait

    def _again(
        self,
        uid: str,
        sleeper: Sleeper,
        error: Exception,
        at_least: float = 0.0,
        at_most: float = LONGEST,
    ) -> None:
        sleeper.failures += 1
        sleeper.doubtful, sleeper.deaf, sleeper.throttled = True, True, False
        most = min(at_most, FIRST * 2.0 ** min(sleeper.failures - 1, 10))
        delay = max(at_least, random.uniform(most / 2, most))
        sleeper.wake_at = time.monotonic() + delay
        stored = self._cache.swarms.get(uid)
        name = stored.place if stored is not None else uid
        why = str(error) or "it took too long"
        log.warning(
            "%s: turn failed (%d in a row), again in %.1f s: %s", name, sleeper.failures, delay, why
        )


def _destroys(decision: Decision) -> bool:
    return any(isinstance(action, (DeletePod, DeleteChild)) for action in decision.actions)
