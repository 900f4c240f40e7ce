"""The gateway's list and watch against an API server with scripted faults, over a real connection.

tests/cluster/api/test_gateway_discovery.py has a real API server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.ports import free_port
from unit.gateway.test_pod_store import make_pod

from modelswarm.kube.client import KubeClient
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.discovery import pod_reflector
from modelswarm_gateway.discovery.kubernetes_source import KubernetesSource
from modelswarm_gateway.discovery.pod_reflector import PodReflector, unready_reason
from modelswarm_gateway.discovery.pod_store import SELECTOR, PodStore
from modelswarm_gateway.runtime.node import Node

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
DEADLINE = 60.0  # seconds; limit of any wait


@dataclass
class Script:
    """Returns answers in order and repeats the last one. Records the requests."""

    lists: list[Answer]
    watches: list[Answer]
    asked: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        script = self.watches if "watch" in request.query else self.lists
        return await (script.pop(0) if len(script) > 1 else script[0])(request)

    @property
    def versions(self) -> list[str]:
        """Return the versions at which watches began."""
        return [query["resourceVersion"] for query in self.asked if "watch" in query]


def listed(version: str, *pods: dict[str, Any], more: str = "") -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        metadata = {"resourceVersion": version, **({"continue": more} if more else {})}
        return web.json_response({"kind": "PodList", "metadata": metadata, "items": pods})

    return answer


def event(kind: str, version: str, content: dict[str, Any] | None = None) -> bytes:
    content = content or {"metadata": {}}
    content = {**content, "metadata": {**content["metadata"], "resourceVersion": version}}
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"


def watched(*parts: bytes, stays: float = 60.0, cut: bool = False) -> Answer:
    """Return a watch's answer in parts; then it stays open, ends, or is aborted."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0.01)
        if cut and request.transport is not None:
            request.transport.abort()
        await asyncio.sleep(stays)
        return response

    return answer


def refused(status: int, message: str = "no", **headers: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = {"kind": "Status", "message": message, "code": status}
        return web.json_response(body, status=status, headers=headers)

    return answer


def ok_with(body: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return answer


@dataclass
class Watching:
    store: PodStore
    watch: PodReflector
    script: Script
    changes: list[set[str]]

    def troubled(self) -> bool:
        return self.watch.problem is not None

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until_present(self, *names: str) -> None:
        wanted = {f"{name}/1" for name in names}
        await self.until(lambda: set(self.store.endpoints()) == wanted)


@contextlib.asynccontextmanager
async def watching(
    folder: Path, lists: list[Answer], watches: list[Answer], scope: str = "ns"
) -> AsyncIterator[Watching]:
    script, store, changes = Script(lists, watches), PodStore(), list[set[str]]()
    async with api_server(script, scope) as port:
        api = KubeClient(kubeconfig(folder, port), user_agent="test")
        clock = asyncio.get_running_loop().time
        watch = PodReflector(
            api, scope, store, lambda: changes.append(set(store.endpoints())), clock, lambda: 0.5
        )
        task = asyncio.create_task(watch.run())
        try:
            yield Watching(store, watch, script, changes)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await api.close()


@contextlib.asynccontextmanager
async def api_server(script: Script, scope: str = "ns") -> AsyncIterator[int]:
    """Serve the script's answers for the pods of a scope; yield the port."""
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/pods" if scope else "/api/v1/pods", script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def kubeconfig(folder: Path, port: int) -> Path:
    file = folder / "kubeconfig"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": "secret"}}],
    }
    file.write_text(json.dumps(config))
    return file


async def test_pods_are_listed_page_by_page_and_then_watched(tmp_path: Path) -> None:
    lists = [listed("7", make_pod("a"), more="next"), listed("7", make_pod("b"))]
    news = event("ADDED", "8", make_pod("c")) + event("DELETED", "9", make_pod("a"))
    async with watching(tmp_path, lists, [watched(news[:300], news[300:])]) as it:
        await it.until_present("b", "c")
        first, second, watch = it.script.asked
        assert (first["labelSelector"], "continue" in first) == (SELECTOR, False)
        assert second["continue"] == "next"
        assert (watch["labelSelector"], watch["resourceVersion"]) == (SELECTOR, "7")
        assert watch["allowWatchBookmarks"] == "true"
        assert it.changes[0] == {"a/1", "b/1"}, "a page is not the whole list"
        assert unready_reason([it.watch]) is None


async def test_models_are_not_known_before_the_pods_are_listed(tmp_path: Path) -> None:
    """Until then a gateway cannot tell clients that a model does not exist."""
    clock = asyncio.get_running_loop().time
    async with api_server(Script([listed("7", make_pod("a"))], [watched()])) as port:
        source = KubernetesSource(kubeconfig(tmp_path, port), ["ns"], clock, lambda: 0.5)
        assert not source.is_listed()
        task = asyncio.create_task(source.run())
        async with asyncio.timeout(DEADLINE):
            while not source.is_listed():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert source.expected_models() == frozenset() and set(source.endpoints()) == {"a/1"}
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_no_model_is_denied_before_all_namespaces_are_listed(tmp_path: Path) -> None:
    """The servers of one may be linked, or have ended, long before the pods of another are known."""
    clock = asyncio.get_running_loop().time
    pod = make_pod("a", ip="127.0.0.1", port=free_port())
    async with api_server(Script([listed("7", pod)], [watched()])) as port:
        config, namespaces = kubeconfig(tmp_path, port), ["ns", "other"]
        source = KubernetesSource(config, namespaces, clock, lambda: 0.5)
        node = Node("gateway/1/x", 1, source, GatewaySettings(), clock, time.time)
        source.on_change = node.discover_servers
        task = asyncio.create_task(source._reflectors[0].run())  # the other list takes longer
        async with asyncio.timeout(DEADLINE):
            while not (source.endpoints() and node.is_settled()):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not node.is_discovery_complete()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await node.shut_down()
        await source._client.close()


async def test_empty_scope_lists_pods_of_all_namespaces(tmp_path: Path) -> None:
    async with watching(tmp_path, [listed("7", make_pod("a"))], [watched()], scope="") as it:
        await it.until_present("a")


async def test_watch_goes_on_from_the_last_version(tmp_path: Path) -> None:
    watches = [
        watched(event("ADDED", "8", make_pod("b")), event("BOOKMARK", "20"), stays=1.1),
        watched(event("ADDED", "21", make_pod("c")), cut=True),
        watched(event("ADDED", "22", make_pod("d"))),
    ]
    async with watching(tmp_path, [listed("7", make_pod("a"))], watches) as it:
        await it.until_present("a", "b", "c", "d")
        assert it.script.versions == ["7", "20", "21"]
        assert sum("watch" not in query for query in it.script.asked) == 1


GONE = {"code": 410, "message": "too old resource version", "metadata": {}}


@pytest.mark.parametrize(
    "gone",
    [
        watched(event("ERROR", "", GONE)),
        refused(410, "Expired"),
        watched(event("ERROR", "", {"code": 500, "message": "oh", "metadata": {}})),
        refused(504, "Too large resource version"),
    ],
    ids=["in the watch", "as its status", "another error", "a store that went back"],
)
async def test_missed_changes_are_listed_again(tmp_path: Path, gone: Answer) -> None:
    """A pod deleted between two watches must disappear."""
    lists = [
        listed("7", make_pod("ghost"), make_pod("a")),
        listed("90", make_pod("a"), make_pod("new")),
    ]
    async with watching(tmp_path, lists, [gone, watched()]) as it:
        await it.until_present("a", "new")
        await it.until(lambda: it.script.versions == ["7", "90"])


@pytest.mark.parametrize(
    "bad",
    [
        ok_with(b"<html>"),
        ok_with(b'{"items": []}'),
        ok_with(b"5"),
        refused(500),
        refused(503),
        watched(b'{"items": [', cut=True),
    ],
    ids=["no JSON", "no list", "a number", "500", "503", "half an answer"],
)
async def test_a_list_that_fails_is_tried_again(tmp_path: Path, bad: Answer) -> None:
    async with watching(tmp_path, [bad, listed("7", make_pod("a"))], [watched()]) as it:
        await it.until(lambda: it.watch.problem is not None)
        assert unready_reason([it.watch]) is not None
        await it.until_present("a")
        assert unready_reason([it.watch]) is None


@pytest.mark.parametrize(
    "bad",
    [
        watched(b"garbage\n"),
        watched(b'{"type": "ADDED"}\n'),
        watched(b'{"type": "ADDED", "object": 5}\n'),
        watched(b"[1]\n"),
        watched(stays=0.0),
        refused(429, **{"Retry-After": "0"}),
    ],
    ids=["garbage", "no object", "odd object", "a list", "ends at once", "too many requests"],
)
async def test_failed_watch_is_retried_and_known_pods_stay(tmp_path: Path, bad: Answer) -> None:
    watches = [bad, bad, watched(event("ADDED", "8", make_pod("b")))]
    async with watching(tmp_path, [listed("7", make_pod("a"))], watches) as it:
        await it.until(lambda: it.watch.failures == 2)
        assert set(it.store.endpoints()) == {"a/1"}
        assert it.troubled()
        await it.until_present("a", "b")
        assert not it.troubled()
        assert it.script.versions == ["7", "7", "7"]


@pytest.mark.full
async def test_retry_after_of_the_api_server_is_kept(tmp_path: Path) -> None:
    busy = refused(429, **{"Retry-After": "1"})
    async with watching(tmp_path, [busy, listed("7", make_pod("a"))], [watched()]) as it:
        began = asyncio.get_running_loop().time()
        await it.until_present("a")
        assert asyncio.get_running_loop().time() - began > 0.9


@pytest.mark.full
async def test_retries_of_a_lost_api_server_back_off(tmp_path: Path) -> None:
    began = asyncio.get_running_loop().time()
    async with watching(tmp_path, [refused(503)], [watched()]) as it:
        await it.until(lambda: len(it.script.asked) == 4)
        assert asyncio.get_running_loop().time() - began > 1.7  # after 0, 0.25, 0.75 and 1.75 s


@pytest.mark.full
async def test_silent_watch_connection_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_reflector, "WATCH_SECONDS", 1.0)
    monkeypatch.setattr(pod_reflector, "WATCH_GRACE_SECONDS", 0.2)
    watches = [watched(), watched(event("ADDED", "8", make_pod("b")))]
    async with watching(tmp_path, [listed("7", make_pod("a"))], watches) as it:
        await it.until_present("a", "b")
        assert it.watch.failures == 1


@pytest.mark.full
async def test_periodic_list_repairs_what_a_watch_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pod_reflector, "RELIST_SECONDS", 0.5)
    lists = [listed("7", make_pod("ghost")), listed("8", make_pod("a"))]
    async with watching(tmp_path, lists, [watched(stays=1.1)]) as it:
        await it.until_present("a")


async def test_forbidden_namespace_does_not_stop_the_others(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with (
        watching(tmp_path, [refused(403, "pods is forbidden")], [watched()]) as closed,
        watching(tmp_path / "other", [listed("7")], [watched()]) as opened,
    ):
        await closed.until(lambda: closed.watch.is_denied)
        await opened.until(lambda: opened.watch.has_listed)
        assert unready_reason([closed.watch, opened.watch]) is None
        reason = unready_reason([closed.watch])
        assert reason is not None
        assert "pods is forbidden" in reason
