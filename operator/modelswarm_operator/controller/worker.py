"""Work queue of swarms: one supervised task each waits for events, takes turns, and survives every error of a turn.

Started by `manager` while this process leads. Events of a swarm that come together start one turn. A turn reads the
cache, has the pure core decide in a thread within a budget of CPU time, and has the decision carried out. Turns of one
swarm are sequential, turns of different swarms overlap up to a limit. Knows no Kubernetes.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from modelswarm.kube.errors import ConflictError, KubeError, ThrottledError
from modelswarm_operator.controller.decision_budget import (
    DECISION_SECONDS,
    DecisionOverrunError,
    run_within,
)
from modelswarm_operator.controller.executor import Executor
from modelswarm_operator.informer.cache import Cache
from modelswarm_operator.informer.resync import Resync
from modelswarm_operator.kube.leader_election import LeaseLostError
from modelswarm_operator.observability.metrics import Metrics
from modelswarm_operator.reconcile.overrun import give_up, is_given_up
from modelswarm_operator.reconcile.state.actions import Decision, DeleteChild, DeletePod
from modelswarm_operator.reconcile.state.observed import Observed

log = logging.getLogger(__name__)

DEBOUNCE_SECONDS = 0.05  # events come in groups
MAX_CONCURRENT_TURNS = 16
TURN_SECONDS = 120.0  # deadline of a turn
UNTHROTTLED_TURNS = 8  # turns in a row that changed something before they are spaced out
MIN_RETRY_PAUSE = 0.1  # seconds after a failed turn, doubled with every further one
MAX_RETRY_PAUSE = 60.0  # seconds
MAX_CONFLICT_PAUSE = 1.0  # seconds, after a turn that failed because others wrote too
MAX_TIMEOUT_SECONDS = 1e9  # a longer wait has no timeout

Decide = Callable[[Observed, float], Decision]


@dataclass(slots=True)
class WorkItem:
    """The state of one swarm's task. Times are monotonic seconds."""

    triggered: asyncio.Event = field(default_factory=asyncio.Event)
    due_at: float = 0.0
    enqueued_at: float = 0.0
    started: bool = False
    failures: int = 0
    backing_off: bool = False  # waits for `api_recovered` or the time, not for events
    api_recovered: asyncio.Event = field(default_factory=asyncio.Event)
    throttled: bool = False  # the API server gave a time to wait
    active_turns: int = 0  # turns in a row with actions
    outcome_unknown: bool = False  # the last turn's writes may or may not have happened


class Workers:
    def __init__(
        self,
        cache: Cache,
        executor: Executor,
        resync: Resync,
        decide: Decide,
        metrics: Metrics,
        cpu_seconds: float = DECISION_SECONDS,
    ) -> None:
        """`cpu_seconds`: the budget of one decision."""
        self._cpu_seconds = cpu_seconds
        self._cache = cache
        self._executor = executor
        self._resync = resync
        self._decide = decide
        self._metrics = metrics
        self._items: dict[str, WorkItem] = {}
        self._free_workers = asyncio.Semaphore(MAX_CONCURRENT_TURNS)
        self._item_added = asyncio.Event()
        self._in_turn: dict[str, float] = {}
        self._stopping = asyncio.Event()

    @property
    def longest_turn_seconds(self) -> float:
        """Seconds that the longest of the running turns has taken so far."""
        now = time.monotonic()
        return max((now - since for since in self._in_turn.values()), default=0.0)

    def enqueue(self, uids: Iterable[str]) -> None:
        now = time.monotonic()
        for uid in uids:
            item = self._items.get(uid)
            if item is None:
                item = self._items[uid] = WorkItem()
                self._item_added.set()
            item.enqueued_at = item.enqueued_at or now
            item.triggered.set()

    def enqueue_spread(self, uids: Iterable[str], within: float) -> None:
        """Enqueue the swarms, spread over `within` seconds."""
        loop = asyncio.get_running_loop()
        for uid in uids:
            loop.call_later(random.uniform(0.0, within), self.enqueue, (uid,))

    def api_recovered(self) -> None:
        """End the back-off of items that failed because the API server did not answer."""
        for item in self._items.values():
            if item.failures and not item.throttled:
                item.api_recovered.set()
                item.triggered.set()

    async def run(self) -> None:
        """Run until stopped. Raises LeaseLostError; no other error ends it."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                await self._item_added.wait()
                self._item_added.clear()
                for uid, item in list(self._items.items()):
                    if not item.started:
                        item.started = True
                        group.create_task(self._work(uid, item), name=f"swarm {uid}")

    def stop(self) -> None:
        """Let running turns end and start no other."""
        self._stopping.set()
        self._item_added.set()
        for item in self._items.values():
            item.triggered.set()
            item.api_recovered.set()

    async def _work(self, uid: str, item: WorkItem) -> None:
        while not self._stopping.is_set():
            await self._wait_until_due(item)
            if self._stopping.is_set() or self._cache.swarms.get(uid) is None:
                break
            async with self._free_workers:
                if self._stopping.is_set():
                    break
                if item.enqueued_at:  # else the time has come for a turn, and no event
                    self._metrics.queue_seconds.observe(time.monotonic() - item.enqueued_at)
                    item.enqueued_at = 0.0
                await self._run_turn(uid, item)
        if self._items.get(uid) is item:
            del self._items[uid]

    async def _wait_until_due(self, item: WorkItem) -> None:
        """Wait for an event or the time. While the API server fails, events do not shorten the wait."""
        signal = item.api_recovered if item.backing_off else item.triggered
        pause = item.due_at - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, pause) if pause < MAX_TIMEOUT_SECONDS else None):
                await signal.wait()
                await asyncio.sleep(DEBOUNCE_SECONDS)
        except TimeoutError:
            pass  # the item is due
        item.triggered.clear()
        item.api_recovered.clear()

    async def _run_turn(self, uid: str, item: WorkItem) -> None:
        started, result = time.monotonic(), "failed"
        self._in_turn[uid] = started
        try:
            async with asyncio.timeout(TURN_SECONDS):
                decision = await self._reconcile(uid, item)
            result = "changed" if decision is not None and decision.actions else "quiet"
            item.failures, item.outcome_unknown, item.backing_off = 0, False, False
            self._schedule_next(item, decision)
        except LeaseLostError:
            raise
        except ConflictError as error:
            result = "conflict"
            self._schedule_retry(uid, item, error, at_most=MAX_CONFLICT_PAUSE)
        except ThrottledError as error:
            result = "throttled"
            self._schedule_retry(uid, item, error, at_least=min(error.retry_after, MAX_RETRY_PAUSE))
            item.throttled = True
        except (KubeError, TimeoutError) as error:
            self._schedule_retry(uid, item, error)
        except Exception as error:  # an internal error: logged in full and retried
            result = "fault"
            log.exception("swarm %s: internal error in a turn", uid)
            self._schedule_retry(uid, item, error)
            item.backing_off = False  # a new spec may avoid the error
        finally:
            del self._in_turn[uid]
            self._metrics.turn_seconds.labels(result).observe(time.monotonic() - started)

    async def _reconcile(self, uid: str, item: WorkItem) -> Decision | None:
        """Decide and carry out on one view; return None if the swarm does not exist any more."""
        fresh = item.outcome_unknown
        observed = await self._observe(uid, fresh)
        if observed is None:
            return None
        decision = await self._decide_within_budget(observed)
        if not fresh and _deletes_objects(decision):  # never on events alone
            observed = await self._observe(uid, True)
            if observed is None:
                return None
            decision = await self._decide_within_budget(observed)
        if decision.actions:
            await self._executor.execute(observed.swarm, decision.actions)
        return decision

    async def _decide_within_budget(self, observed: Observed) -> Decision:
        """A swarm whose decision takes too long is reported, and left alone until its spec changes."""
        swarm, now, seconds = observed.swarm, time.time(), self._cpu_seconds
        if is_given_up(swarm):
            return Decision((), None)
        try:
            return await run_within(lambda: self._decide(observed, now), seconds)
        except DecisionOverrunError:
            if swarm.is_deleting:
                raise  # its pods must go: try again
            log.warning(
                "%s/%s: gave up its plan after %g s of CPU", swarm.namespace, swarm.name, seconds
            )
            return give_up(swarm, seconds, now)

    async def _observe(self, uid: str, refresh: bool) -> Observed | None:
        observed = self._cache.observed(uid)
        if observed is None or not refresh:
            return observed
        self.enqueue(await self._resync.resync_swarm(observed.swarm) - {uid})
        return self._cache.observed(uid)

    def _schedule_next(self, item: WorkItem, decision: Decision | None) -> None:
        """Set the time of the next turn: at once after a turn with actions, until there are none."""
        now = time.monotonic()
        if decision is None:
            item.due_at = now  # the swarm is deleted: its task sees that and ends
            return
        item.active_turns = item.active_turns + 1 if decision.actions else 0
        wait = float("inf")
        if decision.requeue_at is not None:
            wait = max(DEBOUNCE_SECONDS, decision.requeue_at - time.time())
        if item.active_turns:
            wait = min(
                wait,
                DEBOUNCE_SECONDS * 2.0 ** min(max(0, item.active_turns - UNTHROTTLED_TURNS), 20),
            )
        item.due_at = now + wait

    def _schedule_retry(
        self,
        uid: str,
        item: WorkItem,
        error: Exception,
        at_least: float = 0.0,
        at_most: float = MAX_RETRY_PAUSE,
    ) -> None:
        item.failures += 1
        item.outcome_unknown, item.backing_off, item.throttled = True, True, False
        most = min(at_most, MIN_RETRY_PAUSE * 2.0 ** min(item.failures - 1, 10))
        delay = max(at_least, random.uniform(most / 2, most))
        item.due_at = time.monotonic() + delay
        stored = self._cache.swarms.get(uid)
        name = stored.full_name if stored is not None else uid
        why = str(error) or "deadline exceeded"
        log.warning(
            "%s: turn failed (%d in a row), retry in %.1f s: %s", name, item.failures, delay, why
        )


def _deletes_objects(decision: Decision) -> bool:
    return any(isinstance(action, (DeletePod, DeleteChild)) for action in decision.actions)
