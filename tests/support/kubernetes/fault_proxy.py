"""A proxy between the operator and the API server that records every request and can let any of them fail.

Used by the operator's tests at API level. Ends TLS with a certificate of the cluster's authority and passes tokens on.
Runs in a thread of its own, which calls `fault` once per request; watches can be frozen, filtered and cut.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from tools.devcluster.control_plane.pki import Pair

T = TypeVar("T")
HOP = {
    "connection",
    "content-length",
    "transfer-encoding",
    "host",
    "content-encoding",
    "date",
    "server",
}
WRITES = {"POST", "PUT", "PATCH", "DELETE"}


@dataclass(slots=True)
class Call:
    """One request; `code` is the server's (0: the request did not reach it, or has no answer yet)."""

    number: int
    verb: str
    path: str
    query: dict[str, str]
    code: int = 0
    is_at_server: bool = False  # passed on, and not answered yet

    @property
    def watch(self) -> bool:
        return self.query.get("watch", "") in ("true", "1")

    @property
    def writes(self) -> bool:
        """Say whether the request is a write that tests count: not of Leases, access reviews and Events."""
        aside = ("/leases", "/selfsubjectaccessreviews", "/events")
        return self.verb in WRITES and not any(part in self.path for part in aside)

    @property
    def plural(self) -> str:
        parts = self.path.split("/")
        return parts[parts.index("namespaces") + 2] if "namespaces" in parts[:-2] else parts[-1]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one request. `before` runs instead of the request, `after` once the server has handled it."""

    answer: int = 0  # code of a response that the server does not see
    reason: str = ""
    retry_after: int | None = None
    hang: float = 0.0  # seconds without a response before the connection is closed
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    truncated: bool = False  # the response is cut in its middle


@dataclass(slots=True, eq=False)
class _Watch:
    call: Call
    inject: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)
    cut: asyncio.Event = field(default_factory=asyncio.Event)


class FaultProxy:
    def __init__(self, upstream: str, ca: Pair, own: Pair) -> None:
        self.upstream = upstream
        self.calls: list[Call] = []
        self.fault: Callable[[Call], Fault | None] = lambda call: None
        self.rewrite: Callable[[Call, bytes], bytes] = lambda call, body: body  # request bodies
        self.drops: Callable[[Call, dict[str, Any]], bool] = lambda call, event: False
        self.frozen: set[str] = set()  # plurals whose watches deliver nothing
        self._ca = ca
        self._own = own
        self._port = 0  # chosen when it listens
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._watches: set[_Watch] = set()
        self._transports: weakref.WeakSet[asyncio.BaseTransport] = weakref.WeakSet()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        self._within(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._within(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    def _within(self, job: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(job, self._loop).result(30)

    def cut_watches(self, plural: str = "") -> int:
        """Close the connections of watches, and return their number."""

        async def cut() -> int:
            chosen = [each for each in self._watches if plural in ("", each.call.plural)]
            for each in chosen:
                each.cut.set()
            return len(chosen)

        return self._within(cut())

    def inject(self, plural: str, event: dict[str, Any]) -> int:
        """Send an event to all watches of that plural, as if from the API server. Return their number."""

        async def inject() -> int:
            chosen = [each for each in self._watches if each.call.plural == plural]
            for each in chosen:
                each.inject.put_nowait(event)
            return len(chosen)

        return self._within(inject())

    def watching(self, plural: str) -> bool:
        return any(each.call.plural == plural for each in list(self._watches))

    async def _start(self) -> None:
        trust = ssl.create_default_context(cafile=str(self._ca.certificate))
        connector = aiohttp.TCPConnector(ssl=trust, limit=0)
        self._client = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(str(self._own.certificate), str(self._own.key))
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context).start()
        self._port = self._runner.addresses[0][1]

    async def _stop(self) -> None:
        for each in self._watches:
            each.cut.set()
        await self._runner.cleanup()
        await self._client.close()
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
        # A closed TLS connection keeps its socket until the other side answers, which may take long.
        for transport in self._transports:
            if isinstance(transport, asyncio.WriteTransport):
                transport.abort()
        await asyncio.sleep(0)  # the loop closes the sockets

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        call = Call(len(self.calls) + 1, request.method, request.path, dict(request.query))
        self.calls.append(call)
        if request.transport is not None:
            self._transports.add(request.transport)
        fault = self.fault(call) or Fault()
        if fault.hang:
            await asyncio.sleep(fault.hang)
            return _break(request)
        if fault.before is not None:
            fault.before()
            return _break(request)
        if fault.answer:
            call.code = fault.answer
            return _status(fault)
        return await (self._watch if call.watch else self._pass_on)(request, call, fault)

    async def _ask(self, request: web.Request, call: Call) -> aiohttp.ClientResponse:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP}
        headers["Accept-Encoding"] = "identity"
        answer = await self._client.request(
            request.method,
            self.upstream + request.raw_path,
            headers=headers,
            data=self.rewrite(call, await request.read()) or None,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        )
        if answer.connection is not None and answer.connection.transport is not None:
            self._transports.add(answer.connection.transport)
        return answer

    async def _pass_on(self, request: web.Request, call: Call, fault: Fault) -> web.StreamResponse:
        call.is_at_server = True
        try:
            answer = await self._ask(request, call)
            body = await answer.read()
            call.code = answer.status
        except aiohttp.ClientError:
            return _break(request)
        finally:
            call.is_at_server = False
        if fault.after is not None:
            fault.after()
            return _break(request)
        headers = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
        if fault.truncated:
            response = web.StreamResponse(status=answer.status, headers=headers)
            response.content_length = len(body)
            await response.prepare(request)
            await response.write(body[: len(body) // 2])
            return _break(request)
        return web.Response(status=answer.status, headers=headers, body=body)

    async def _watch(self, request: web.Request, call: Call, fault: Fault) -> web.StreamResponse:
        try:
            answer = await self._ask(request, call)
        except aiohttp.ClientError:
            return _break(request)
        headers = {key: value for key, value in answer.headers.items() if key.lower() not in HOP}
        response = web.StreamResponse(status=answer.status, headers=headers)
        call.code = answer.status
        watch = _Watch(call)
        self._watches.add(watch)
        try:
            await response.prepare(request)
            await self._stream(answer, response, watch)
        except (aiohttp.ClientError, ConnectionError):
            return response  # one side has closed
        finally:
            self._watches.discard(watch)
            answer.close()
        return _break(request) if watch.cut.is_set() else response

    async def _stream(
        self, answer: aiohttp.ClientResponse, response: web.StreamResponse, watch: _Watch
    ) -> None:
        """Pass on each line: an event."""
        reading = asyncio.ensure_future(answer.content.readuntil(b"\n"))
        waiting = asyncio.ensure_future(watch.inject.get())
        cutting = asyncio.ensure_future(watch.cut.wait())
        try:
            while True:
                await asyncio.wait({reading, waiting, cutting}, return_when=asyncio.FIRST_COMPLETED)
                if cutting.done():
                    return
                if waiting.done():
                    await response.write(json.dumps(waiting.result()).encode() + b"\n")
                    waiting = asyncio.ensure_future(watch.inject.get())
                if reading.done():
                    line = reading.result()
                    if not line:
                        return
                    if watch.call.plural not in self.frozen and not self._dropped(watch, line):
                        await response.write(line)
                    reading = asyncio.ensure_future(answer.content.readuntil(b"\n"))
        except (asyncio.IncompleteReadError, ValueError):
            return
        finally:
            for task in (reading, waiting, cutting):
                task.cancel()

    def _dropped(self, watch: _Watch, line: bytes) -> bool:
        return self.drops(watch.call, json.loads(line))


def _break(request: web.Request) -> web.StreamResponse:
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=503)  # the client is gone


def _status(fault: Fault) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": fault.reason,
        "message": f"the fault proxy answers {fault.answer}",
        "code": fault.answer,
    }
    headers = {"Retry-After": str(fault.retry_after)} if fault.retry_after is not None else {}
    return web.json_response(body, status=fault.answer, headers=headers)
