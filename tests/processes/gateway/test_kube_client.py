"""The Kubernetes client that gateway and operator share, against an API server with scripted responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from modelswarm.kube.client import KubeClient
from modelswarm.kube.errors import (
    ConflictError,
    KubeUnavailableError,
    UnauthorizedError,
    UnreachableError,
)

POD = "/api/v1/namespaces/ns/pods/a"
PODS = "/api/v1/namespaces/ns/pods"


@dataclass
class Server:
    """Returns responses in order; the last one is repeated."""

    responses: list[tuple[int, Any]]
    requests: list[dict[str, Any]] = field(default_factory=list)
    calls: list[tuple[str, str, int]] = field(default_factory=list)
    is_silent: bool = False

    async def respond(self, request: web.Request) -> web.StreamResponse:
        body = await request.text()
        self.requests.append(
            {
                "verb": request.method,
                "token": request.headers.get("Authorization"),
                "type": request.headers.get("Content-Type"),
                "query": dict(request.query),
                "body": json.loads(body) if body else None,
            }
        )
        if self.is_silent:
            await asyncio.sleep(3600)
        status, answer = self.responses.pop(0) if len(self.responses) > 1 else self.responses[0]
        text = answer if isinstance(answer, str) else json.dumps(answer)
        return web.Response(status=status, text=text, content_type="application/json")


def write_kubeconfig(file: Path, port: int, token: str) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "it",
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "me"}}],
        "clusters": [{"name": "it", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": token}}],
    }
    file.write_text(json.dumps(config))


@contextlib.asynccontextmanager
async def connected(
    folder: Path, *responses: tuple[int, Any]
) -> AsyncIterator[tuple[KubeClient, Server]]:
    server = Server(list(responses))
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.respond)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    file = folder / "kubeconfig"
    port = runner.addresses[0][1]
    write_kubeconfig(file, port, "old")
    client = KubeClient(
        file,
        user_agent="test",
        record_call=lambda verb, path, code, seconds: server.calls.append((verb, path, code)),
    )
    try:
        await client.connect()
        write_kubeconfig(file, port, "new")
        yield client, server
    finally:
        await client.close()
        await runner.cleanup()


DENIED = (401, {"kind": "Status", "message": "Unauthorized"})


async def test_a_rotated_token_is_loaded_after_a_401(tmp_path: Path) -> None:
    async with connected(tmp_path, DENIED, (200, {"kind": "Pod"})) as (client, server):
        assert await client.get(POD) == {"kind": "Pod"}
        assert [request["token"] for request in server.requests] == ["Bearer old", "Bearer new"]
        assert server.calls == [("GET", POD, 401), ("GET", POD, 200)]


async def test_a_second_401_is_final(tmp_path: Path) -> None:
    async with connected(tmp_path, DENIED) as (client, server):
        with pytest.raises(UnauthorizedError):
            await client.get(POD)
        assert len(server.requests) == 2


async def test_a_watch_is_opened_again_after_a_401(tmp_path: Path) -> None:
    async with connected(tmp_path, DENIED, (200, '{"type": "ADDED"}\n')) as (client, server):
        events = [event async for event in client.watch(PODS, {"watch": "true"}, 5.0)]
        assert events == [{"type": "ADDED"}]
        assert [request["token"] for request in server.requests] == ["Bearer old", "Bearer new"]


async def test_a_list_is_read_page_by_page(tmp_path: Path) -> None:
    first = {"metadata": {"resourceVersion": "7", "continue": "next"}, "items": [{"n": 1}]}
    last = {"metadata": {"resourceVersion": "7"}, "items": [{"n": 2}]}
    async with connected(tmp_path, (200, first), (200, last)) as (client, server):
        assert await client.list_all(PODS, {"labelSelector": "a=b"}, 1) == (
            [{"n": 1}, {"n": 2}],
            "7",
        )
        assert [request["query"] for request in server.requests] == [
            {"labelSelector": "a=b", "limit": "1"},
            {"labelSelector": "a=b", "limit": "1", "continue": "next"},
        ]


@pytest.mark.parametrize(
    "answer",
    ["<html>", {"items": []}, {"metadata": {"resourceVersion": "1"}}, "[" * 9_000],
    ids=["html", "no version", "no items", "half of a deep one"],
)
async def test_an_answer_that_is_no_list_is_no_answer(tmp_path: Path, answer: Any) -> None:
    async with connected(tmp_path, (200, answer)) as (client, _):
        with pytest.raises(UnreachableError):
            await client.list_all(PODS, {})


async def test_a_deeply_nested_object_ends_no_list_and_no_watch(tmp_path: Path) -> None:
    deep = '{"n": ' + "[" * 9_980 + "]" * 9_980 + "}"
    listed = f'{{"metadata": {{"resourceVersion": "7"}}, "items": [{deep}, {{"n": 2}}]}}'
    event = f'{{"type": "ADDED", "object": {deep}}}\n{{"type": "BOOKMARK"}}\n'
    async with connected(tmp_path, (200, listed), (200, event)) as (client, _):
        items, _ = await client.list_all(PODS, {})
        assert (len(items), items[1]) == (2, {"n": 2})
        events = [event["type"] async for event in client.watch(PODS, {"watch": "true"}, 5.0)]
        assert events == ["ADDED", "BOOKMARK"]


async def test_a_delete_names_the_uid_of_its_object(tmp_path: Path) -> None:
    conflict = (409, {"kind": "Status", "reason": "Conflict", "message": "another uid"})
    async with connected(tmp_path, conflict) as (client, server):
        with pytest.raises(ConflictError, match="another uid"):
            await client.delete(POD, "u1", 0)
        body = server.requests[0]["body"]
        assert (body["preconditions"], body["gracePeriodSeconds"]) == ({"uid": "u1"}, 0)


async def test_the_fence_stops_writes_and_nothing_else(tmp_path: Path) -> None:
    def closed() -> float:
        raise RuntimeError("not the leader")

    async with connected(tmp_path, (200, {})) as (client, server):
        client.fence = closed
        for write in (client.post, client.put, client.patch):
            with pytest.raises(RuntimeError):
                await write(POD, {})
        await client.get(POD)
        await client.send("PUT", POD, {})
        assert [request["verb"] for request in server.requests] == ["GET", "PUT"]


async def test_a_write_takes_no_longer_than_the_fence_allows(tmp_path: Path) -> None:
    """The server never responds; only the deadline ends the request."""
    async with connected(tmp_path, (200, {})) as (client, server):
        server.is_silent = True
        client.fence = lambda: 0.2
        with pytest.raises(UnreachableError, match=r"PUT .*no answer"):
            await client.put(POD, {})
        assert len(server.requests) <= 1  # a busy machine may not have sent it in that time


async def test_each_kind_of_patch_has_its_content_type(tmp_path: Path) -> None:
    async with connected(tmp_path, (200, {})) as (client, server):
        await client.patch(POD, {"metadata": {}})
        await client.apply(POD, {"metadata": {}}, "me")
        assert [request["type"] for request in server.requests] == [
            "application/merge-patch+json",
            "application/apply-patch+yaml",
        ]
        assert server.requests[1]["query"] == {"fieldManager": "me", "force": "true"}


async def test_server_error_differs_from_missing_server(tmp_path: Path) -> None:
    async with connected(tmp_path, (503, {"message": "busy"})) as (client, _):
        with pytest.raises(KubeUnavailableError) as answered:
            await client.get(POD)
        assert not isinstance(answered.value, UnreachableError)
        assert answered.value.code == 503
        write_kubeconfig(tmp_path / "closed", 1, "x")
        unreachable = KubeClient(tmp_path / "closed", user_agent="test")
        with pytest.raises(UnreachableError):
            await unreachable.get(POD)
        await unreachable.close()
