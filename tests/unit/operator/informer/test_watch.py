"""The watches of the operator: kopf itself, against a stand-in for the API server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web
from support.eventually import SECONDS

from modelswarm_operator.informer.watch import Watch
from modelswarm_operator.kube.resources import SWARM

LEVELS = 5_000
OBJECT: dict[str, Any] = {"apiVersion": SWARM.api_version, "kind": SWARM.kind, "spec": {"x": 0}}
VERBS = {"namespaced": True, "verbs": ["list", "watch", "patch"]}
VERSION = {"groupVersion": SWARM.api_version, "version": SWARM.version}
GROUP = {"name": SWARM.group, "versions": [VERSION], "preferredVersion": VERSION}
DISCOVERY: dict[str, Any] = {
    "/api": {"versions": ["v1"]},
    "/api/v1": {
        "resources": [{"name": "namespaces", "singularName": "", "kind": "Namespace", **VERBS}]
    },
    "/apis": {"groups": [GROUP]},
    f"/apis/{SWARM.api_version}": {
        "resources": [{"name": SWARM.plural, "singularName": "", "kind": SWARM.kind, **VERBS}]
    },
}
KUBECONFIG = {
    "apiVersion": "v1",
    "kind": "Config",
    "users": [{"name": "u", "user": {"token": "t"}}],
    "contexts": [{"name": "k", "context": {"cluster": "c", "user": "u"}}],
    "current-context": "k",
}


def swarm(name: str, levels: int = 1) -> str:
    meta = {"name": name, "namespace": "n", "uid": name, "resourceVersion": "5"}
    text = json.dumps(OBJECT | {"metadata": meta})
    return text.replace('"x": 0', f'"x": {"[" * levels}{"]" * levels}')


class ApiServer:
    """Answers one list and one watch of swarms; then it refuses the token."""

    def __init__(self) -> None:
        self.refused = 0
        self._has_ended = False

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self._has_ended:
            self.refused += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if request.path in DISCOVERY:
            return web.json_response(DISCOVERY[request.path])
        if "watch" not in request.query:
            items = f"[{swarm('a', LEVELS)}, {swarm('b')}]"
            text = f'{{"metadata": {{"resourceVersion": "9"}}, "items": {items}}}'
            return web.Response(text=text, content_type="application/json")
        stream = web.StreamResponse()
        await stream.prepare(request)
        for each in (swarm("c", LEVELS), swarm("d")):
            await stream.write(f'{{"type": "ADDED", "object": {each}}}\n'.encode())
        self._has_ended = True
        return stream


async def test_deeply_nested_swarm_ends_no_watch(tmp_path: Path) -> None:
    """The API server stores 10,000 levels, and kopf's json reads some 1,000. A refused token is used once."""
    api, seen = ApiServer(), list[tuple[str, str]]()
    server = web.Application()
    server.router.add_get("/{path:.*}", api.answer)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    [(host, port)] = runner.addresses
    cluster = {"name": "c", "cluster": {"server": f"http://{host}:{port}"}}
    (tmp_path / "config").write_text(json.dumps(KUBECONFIG | {"clusters": [cluster]}))
    watch = Watch(
        tmp_path / "config",
        (),
        [SWARM],
        lambda _, happened, raw: seen.append((happened, raw["metadata"]["name"])),
    )
    try:
        reason = await asyncio.wait_for(watch.run(), SECONDS)
    finally:
        await runner.cleanup()
    assert sorted(seen) == [("", "a"), ("", "b"), ("ADDED", "c"), ("ADDED", "d")]
    assert "valid credentials" in reason
    assert api.refused == 1
