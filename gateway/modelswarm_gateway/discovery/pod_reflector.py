"""Keeps the book of pods like the API server's: one list and watch per namespace.

Made by `main.py`, which runs `run` as long as the process lives. A watch goes on where the last one ended; whatever
else goes wrong ends in a new list, which replaces all that was known. While the API server cannot be reached the book
stays as it is: pods that serve do not need it. Every request has a deadline, so a connection that is dead is noticed
within `WATCH_SECONDS` and a little. Decides nothing about who is dialled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Never, Protocol

from modelswarm.kube.errors import KubeError, ThrottledError, UnreachableError
from modelswarm_gateway.discovery.pod_store import SELECTOR, PodStore

log = logging.getLogger(__name__)

PAGE_SIZE = 250  # pods per answer: reading more would hold up the streams for longer
PAGE_SECONDS = 15.0  # for one such answer
WATCH_SECONDS = 40.0  # then the API server ends a watch
WATCH_GRACE_SECONDS = 10.0  # after that, the connection is taken for dead
RELIST_SECONDS = 600.0  # a watch that forgot something is put right after so long
FIRST_PAUSE = 0.25
MAX_PAUSE = 5.0
MIN_WATCH_SECONDS = 1.0  # a watch that ends sooner has not worked
GONE_STATUS = 410  # the version asked for is not kept any more
DENIED_STATUSES = (401, 403, 404)


class PodApi(Protocol):
    """The part of `KubeClient` that is used here."""

    async def list_all(
        self, path: str, query: Mapping[str, str], page_size: int, seconds: float
    ) -> tuple[list[dict[str, Any]], str]: ...

    def watch(
        self, path: str, query: Mapping[str, str], seconds: float
    ) -> AsyncGenerator[Any, None]: ...


class _Relist(Exception):
    """The watch cannot go on; the message says why."""


class PodReflector:
    """One scope: a namespace, or all of them ("")."""

    def __init__(
        self, api: PodApi, scope: str, store: PodStore, on_change: Callable[[], None],
        clock: Callable[[], float], jitter: Callable[[], float],
    ) -> None:  # fmt: skip
        """`changed` is called after each change of the book; `jitter` gives numbers in [0, 1)."""
        self._api, self._scope, self._store, self._on_change = api, scope, store, on_change
        self._clock, self._jitter = clock, jitter
        self._path = f"/api/v1/namespaces/{scope}/pods" if scope else "/api/v1/pods"
        self._version = ""
        self._pause = FIRST_PAUSE
        self.has_listed = False  # once, at least
        self.problem: str | None = None  # why it does not hear of changes now
        self.is_denied = False  # the last answer was a refusal that waiting does not mend
        self.failures = 0

    async def run(self) -> Never:
        while True:
            try:
                self._version = await self._list()
                await self._watch_until_relist()
            except _Relist as reason:
                log.info("pods of %s are listed again: %s", self._scope_name, reason)
                await self._back_off(0.0)
            except KubeError as error:
                await self._on_failure(error)
            except Exception:
                log.exception("pods of %s: a fault of ours", self._scope_name)
                await self._back_off(0.0)

    @property
    def _scope_name(self) -> str:
        return f"namespace {self._scope}" if self._scope else "all namespaces"

    async def _list(self) -> str:
        """Replaces what is known; returns the version it is of."""
        query = {"labelSelector": SELECTOR}
        items, version = await self._api.list_all(self._path, query, PAGE_SIZE, PAGE_SECONDS)
        self._store.replace_scope(self._scope, items)
        if not self.has_listed:
            log.info("%d pods of servers in %s", len(items), self._scope_name)
        self.has_listed, self.problem, self.is_denied = True, None, False
        self._on_change()
        return version

    async def _watch_until_relist(self) -> None:
        """Takes in changes from the list on, watch after watch. Ends only by raising, or to be listed anew."""
        end = self._clock() + RELIST_SECONDS * (0.75 + 0.5 * self._jitter())
        while self._clock() < end:
            try:
                await self._watch_once()
            except (UnreachableError, ThrottledError) as error:
                await self._on_failure(error)  # the next watch goes on from the last event
            except KubeError as error:
                if error.code == GONE_STATUS:
                    raise _Relist(_describe(error)) from error
                raise

    async def _watch_once(self) -> None:
        """One watch, from the version that was heard last."""
        began = self._clock()
        seconds = WATCH_SECONDS * (0.75 + 0.25 * self._jitter())
        query = {
            "labelSelector": SELECTOR,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(int(seconds)),
        }
        events = self._api.watch(self._path, query, seconds + WATCH_GRACE_SECONDS)
        async with aclosing(events):
            async for event in events:
                self._apply_event(event)
                self._on_success()
        if self._clock() - began < MIN_WATCH_SECONDS:
            raise UnreachableError("the watch ended at once")
        self._on_success()

    def _apply_event(self, event: Any) -> None:
        try:
            kind, content = event["type"], event["object"]
            said = f"{content.get('code')}: {content.get('message')}"
            if kind != "ERROR":
                self._version = str(content["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreachableError("the answer is not an event of a watch") from error
        if kind == "ERROR":
            raise _Relist(said)
        if kind != "BOOKMARK":
            self._store.apply_event(self._scope, kind, content)
            self._on_change()

    def _on_success(self) -> None:
        if self.problem is not None:
            log.info("pods of %s are watched again", self._scope_name)
        self.problem, self.is_denied, self._pause = None, False, FIRST_PAUSE

    async def _on_failure(self, error: KubeError) -> None:
        """Tells of it once, and waits."""
        self.failures += 1
        if self.problem is None:
            log.warning(
                "pods of %s cannot be watched, what is known stays: %s",
                self._scope_name,
                _describe(error),
            )
        self.problem = _describe(error)
        self.is_denied = error.code in DENIED_STATUSES
        await self._back_off(error.retry_after)

    async def _back_off(self, least: float) -> None:
        """Longer each time, until a watch works."""
        await asyncio.sleep(max(least, self._pause * (0.5 + self._jitter())))
        self._pause = min(2 * self._pause, MAX_PAUSE)


def _describe(error: KubeError) -> str:
    return f"{error.code}: {error}" if error.code else str(error)


def unready_reason(reflectors: Sequence[PodReflector]) -> str | None:
    """Why the gateway cannot know yet who exists; None when it does.

    A namespace that it may not read stops only the gateways that may read no other.
    """
    if any(watch.has_listed for watch in reflectors) and all(
        w.has_listed or w.is_denied for w in reflectors
    ):
        return None
    said = [f"{watch.problem}" for watch in reflectors if not watch.has_listed and watch.problem]
    return "the pods of the swarms are not known yet" + (f": {said[0]}" if said else "")
