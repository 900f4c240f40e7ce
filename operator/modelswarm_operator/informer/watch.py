"""kopf's watches: every event goes to the cache, and nothing else of kopf is used.

Started by `manager` while this process leads. kopf runs in a thread with an event loop of its own, because it
cancels every task of its loop when it ends. It ends on responses that are odd but harmless (a 410 or a 500 of a watch,
a CRD that is deleted). Then `manager` starts it again, and missed changes come with the next list. No daemons, no
timers, no indexes, no handlers that patch: kopf writes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import kopf

from modelswarm.kube.client import load_configuration
from modelswarm_operator.informer.shallow_response import ShallowResponse
from modelswarm_operator.kube.resources import Kind
from modelswarm_operator.reconcile.state import names
from modelswarm_operator.reconcile.state.observed import Json

log = logging.getLogger(__name__)

MAX_MESSAGE = 300  # characters of kopf's error message

Sink = Callable[[Kind, str, Json], None]  # kind, ADDED/MODIFIED/DELETED or "" (listed), object


class Watch:
    """Runs kopf once per `run`. The sink is called in the event loop that called `run`."""

    def __init__(
        self, kubeconfig: Path | None, namespaces: Sequence[str], kinds: Sequence[Kind], sink: Sink
    ) -> None:
        self._kubeconfig = kubeconfig
        self._namespaces = tuple(namespaces)
        self._kinds = tuple(kinds)
        self._sink = sink
        self._is_over = False
        self._last_login: kopf.ConnectionInfo | None = None

    async def run(self) -> str:
        """Run until kopf ends; return the reason. kopf's thread may still clean up after that."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[str] = loop.create_future()

        def report(why: str) -> None:
            self._is_over = True
            if not ended.done():
                ended.set_result(why)

        def end(why: str) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(report, why)

        threading.Thread(
            target=self._run_kopf_thread, args=(loop, end), name="watches", daemon=True
        ).start()
        return await ended

    def _run_kopf_thread(self, loop: asyncio.AbstractEventLoop, end: Callable[[str], None]) -> None:
        """Run kopf in this thread until it ends; report the reason."""
        with _KopfErrors() as last:
            try:
                asyncio.run(self._run_kopf(loop, last, lambda: end(last.message)))
            except BaseException as error:  # kopf also ends by being cancelled
                end(last.message or f"{type(error).__name__}: {error}")
            else:
                end(last.message or "it ended without an error")

    async def _run_kopf(
        self, loop: asyncio.AbstractEventLoop, last: _KopfErrors, ending: Callable[[], None]
    ) -> None:
        asyncio.get_running_loop().set_exception_handler(_ignore_loop_error)
        stop = asyncio.Event()
        last.on_unresolved = stop.set  # otherwise it would never watch that kind
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        kopf.on.cleanup(registry=registry)(
            _cleanup_handler(ending)
        )  # the watches have ended by then
        for kind in self._kinds:
            watched = (kind.group, kind.version, kind.plural)
            on_event = kopf.on.event(*watched, id=kind.plural, registry=registry)
            on_event(self._handler(kind, loop))
        await kopf.operator(
            registry=registry,
            settings=_settings(self._kinds),
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
        )

    def _handler(self, kind: Kind, loop: asyncio.AbstractEventLoop) -> Any:
        async def seen(event: Any, **ignored: Any) -> None:
            if not self._is_over and not loop.is_closed():
                loop.call_soon_threadsafe(self._sink, kind, event["type"] or "", event["object"])

        return seen

    async def _login(self, **ignored: Any) -> kopf.AiohttpSession | None:
        """Return a session with the credentials; None, which ends kopf, if the same were refused just now.

        kopf calls this again after a 401, so a rotated token is read again.
        """
        loaded = await load_configuration(self._kubeconfig)
        scheme, _, token = str(loaded.api_key.get("BearerToken", "")).partition(" ")
        login = kopf.ConnectionInfo(
            server=loaded.host,
            ca_path=loaded.ssl_ca_cert,
            insecure=not loaded.verify_ssl,
            scheme=scheme.capitalize() if token else None,
            token=token or None,
            certificate_path=loaded.cert_file,
            private_key_path=loaded.key_file,
        )
        if login == self._last_login:
            return None
        self._last_login = login
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=login.as_ssl_context()),
            headers=login.as_http_headers(),
            response_class=ShallowResponse,
        )
        return kopf.AiohttpSession(server=login.server, aiohttp_session=session)


class _KopfErrors(logging.Handler):
    """Keeps the last error that kopf logs, instead of its tracebacks in the log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.message = ""
        self.on_unresolved: Callable[[], None] = lambda: None

    def emit(self, record: logging.LogRecord) -> None:
        unresolved = record.getMessage().startswith("Unresolved resources")
        if unresolved or record.levelno >= logging.ERROR:
            self.message = " ".join(record.getMessage().split())[:MAX_MESSAGE]
        if unresolved:
            self.on_unresolved()

    def __enter__(self) -> _KopfErrors:
        logging.getLogger("kopf").addHandler(self)
        return self

    def __exit__(self, *ignored: object) -> None:
        logging.getLogger("kopf").removeHandler(self)


def _cleanup_handler(ending: Callable[[], None]) -> Any:
    async def happened(**ignored: Any) -> None:
        ending()

    return happened


def _ignore_loop_error(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore errors of tasks that kopf leaves behind; the reason of its end is logged once."""
    log.debug("kopf's loop: %s", context.get("message"))


def _settings(kinds: Sequence[Kind]) -> kopf.OperatorSettings:
    """Set every setting that matters, so that kopf's defaults may change."""
    settings = kopf.OperatorSettings()
    for kind in kinds:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = None
    settings.watching.connect_timeout = 5
    settings.watching.inactivity_timeout = (
        70  # bookmarks come every 60 s: no data means a dead stream
    )
    settings.watching.reconnect_backoff = 0.2
    settings.watching.chunk_size = 500
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 5
    settings.networking.error_backoffs = (0.2, 0.5, 1, 2)
    settings.queueing.worker_limit = None
    settings.queueing.idle_timeout = 1
    settings.persistence.finalizer = f"{names.DOMAIN}/kopf-never-sets-this"
    settings.posting.enabled = False
    settings.scanning.disabled = True  # no permissions on CRDs and namespaces are needed
    settings.process.ultimate_exiting_timeout = None
    return settings
