"""HTTP server of /live, /ready and /metrics, on the standby too.

Started by `app` before anything else, so that a process that cannot reach the API server can report it. Live means that
a restart would not help; ready means that this process could lead, or leads and sees the cluster.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from modelswarm.errors import UserError
from modelswarm.process.socket_options import listen_on

_BACKLOG = 128

Problem = Callable[[], str]  # "" if all is well
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ProbeServer:
    def __init__(
        self,
        registry: CollectorRegistry,
        live: Problem,
        ready: Problem,
        refresh: Callable[[], None],
    ) -> None:
        self._registry = registry
        self._live = live
        self._ready = ready
        self._refresh = refresh
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Start and return the bound port. Raises UserError if it is taken."""
        app = web.Application()
        app.router.add_get("/live", self._answer(self._live))
        app.router.add_get("/ready", self._answer(self._ready))
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            await web.SockSite(self._runner, listen_on(host, port, _BACKLOG)).start()
        except OSError as error:
            await self._runner.cleanup()
            raise UserError(
                "--metrics", f"{host}:{port} cannot be bound: {error.strerror}"
            ) from None
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def _answer(self, problem: Problem) -> Handler:
        async def answer(_: web.Request) -> web.Response:
            found = problem()
            return web.Response(text=(found or "ok") + "\n", status=503 if found else 200)

        return answer

    async def _metrics(self, _: web.Request) -> web.Response:
        self._refresh()
        body = generate_latest(self._registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})
