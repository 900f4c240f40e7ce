"""Reflector: keeps the pod store equal to the API server's pods, by one list and watch per namespace.

Made by `kubernetes_source.py`, which runs it until the process ends. A watch continues where the last one ended. Any
other failure ends in a new list, which replaces all that was known. While the API server cannot be reached the store
stays as it is: serving pods do not need the API server. Every request has a deadline, so a dead connection is noticed
soon after `WATCH_SECONDS`. Decides nothing about dials.
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

# Pods per page of a list: reading a larger page would delay the streams for longer.
PAGE_SIZE = 250
# Deadline of one page, in seconds.
PAGE_SECONDS = 15.0
# Length of a watch, in seconds; then the API server ends it.
WATCH_SECONDS = 40.0
# Seconds after the end of a watch at which its connection is taken for dead.
WATCH_GRACE_SECONDS = 10.0
# Seconds between lists, which repair the store if a watch missed an event.
RELIST_SECONDS = 600.0
# First and longest pause after a failure, in seconds.
FIRST_PAUSE, MAX_PAUSE = 0.25, 5.0
# A watch that ends sooner, in seconds, has failed.
MIN_WATCH_SECONDS = 1.0
# HTTP status if the API server no longer keeps the requested version.
GONE_STATUS = 410
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
    """The watch cannot continue; the message gives the reason."""


class PodReflector:
    """Reflector of one scope: a namespace, or all namespaces ("")."""

    def __init__(
        self, api: PodApi, scope: str, store: PodStore, on_change: Callable[[], None],
        clock: Callable[[], float], jitter: Callable[[], float],
    ) -> None:  # fmt: skip
        """`on_change` is called after each change of the store; `jitter` returns numbers in [0, 1)."""
        self._api, self._scope, self._store, self._on_change = api, scope, store, on_change
        self._clock, self._jitter = clock, jitter
        self._path = f"/api/v1/namespaces/{scope}/pods" if scope else "/api/v1/pods"
        self._version = ""
        self._pause = FIRST_PAUSE
        self.has_listed = False
        self.problem: str | None = None  # reason why it receives no changes now
        self.is_denied = False  # the last answer was a refusal that a retry does not change
        self.failures = 0

    async def run(self) -> Never:
        while True:
            try:
                self._version = await self._list()
                await self._watch_until_relist()
            except _Relist as reason:
                log.info("listing the pods of %s again: %s", self._scope_name, reason)
                await self._back_off(0.0)
            except KubeError as error:
                await self._on_failure(error)
            except Exception:
                log.exception("internal error in the watch on pods of %s", self._scope_name)
                await self._back_off(0.0)

    @property
    def _scope_name(self) -> str:
        return f"namespace {self._scope}" if self._scope else "all namespaces"

    async def _list(self) -> str:
        """Replace the scope's pods by those of a new list; return its resource version."""
        query = {"labelSelector": SELECTOR}
        items, version = await self._api.list_all(self._path, query, PAGE_SIZE, PAGE_SECONDS)
        self._store.replace_scope(self._scope, items)
        if not self.has_listed:
            log.info("found %d server pods in %s", len(items), self._scope_name)
        self.has_listed, self.problem, self.is_denied = True, None, False
        self._on_change()
        return version

    async def _watch_until_relist(self) -> None:
        """Apply changes, watch after watch, until the next list is due. Raise an error that needs a new list."""
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
        """Run one watch, from the last version received."""
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
            problem = f"{content.get('code')}: {content.get('message')}"
            if kind != "ERROR":
                self._version = str(content["metadata"]["resourceVersion"])
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreachableError("the answer is not an event of a watch") from error
        if kind == "ERROR":
            raise _Relist(problem)
        if kind != "BOOKMARK":
            self._store.apply_event(self._scope, kind, content)
            self._on_change()

    def _on_success(self) -> None:
        if self.problem is not None:
            log.info("watching the pods of %s again", self._scope_name)
        self.problem, self.is_denied, self._pause = None, False, FIRST_PAUSE

    async def _on_failure(self, error: KubeError) -> None:
        """Log the first of several failures, and sleep."""
        self.failures += 1
        if self.problem is None:
            log.warning(
                "cannot watch the pods of %s, keeping the known ones: %s",
                self._scope_name,
                _describe(error),
            )
        self.problem = _describe(error)
        self.is_denied = error.code in DENIED_STATUSES
        await self._back_off(error.retry_after)

    async def _back_off(self, least: float) -> None:
        """Sleep, longer each time until a watch works; at least `least` seconds."""
        await asyncio.sleep(max(least, self._pause * (0.5 + self._jitter())))
        self._pause = min(2 * self._pause, MAX_PAUSE)


def _describe(error: KubeError) -> str:
    return f"{error.code}: {error}" if error.code else str(error)


def unready_reason(reflectors: Sequence[PodReflector]) -> str | None:
    """Return why the pods are not known yet; None when they are.

    A namespace that must not be read delays readiness only if no other one can be read.
    """
    if any(watch.has_listed for watch in reflectors) and all(
        w.has_listed or w.is_denied for w in reflectors
    ):
        return None
    problems = [
        f"{watch.problem}" for watch in reflectors if not watch.has_listed and watch.problem
    ]
    return "the pods of the swarms are not known yet" + (f": {problems[0]}" if problems else "")
