"""The page of `modelswarm ui`, served by the gateway itself (`--ui`): servers, live sessions and a chat.

It asks this gateway's own HTTP and admin ports, from a thread. Servers cannot be killed there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING

from modelswarm.process.command_line import join_target, split_target

if TYPE_CHECKING:
    from modelswarm.client.browser.server import PageServer

log = logging.getLogger(__name__)
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # -> the address by which they are reached here


class GatewayPage:
    """The page's server, with its port bound. It starts and stops as the HTTP servers do."""

    def __init__(self, server: PageServer) -> None:
        self._server = server
        self._thread = threading.Thread(target=server.serve_forever, name="page", daemon=True)

    async def start(self) -> None:
        """Serve, and log the address with its token."""
        self._thread.start()
        log.info("the page is at %s", self._server.url)

    async def stop(self) -> None:
        """Stop, without blocking the event loop until the thread has noticed."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._server.shutdown)
        self._server.stop()


def open_browser_page(target: str | None, http: str, admin: str) -> list[GatewayPage]:
    """Bind the page's port; nothing without a target. `http`, `admin`: the addresses at which this gateway listens.

    Raise UserError for an address that others can reach, or a port that is in use.
    """
    if target is None:
        return []
    from modelswarm.client.browser.server import PageServer
    from modelswarm.client.browser.source import Source

    host, port = split_target("--ui", target)
    source = Source(_reachable(admin), f"http://{_reachable(http)}")
    return [GatewayPage(PageServer(host, port, source, flag="--ui"))]


def _reachable(listening: str) -> str:
    """Return an address at which a listener on `listening` is reached from here."""
    host, port = split_target("--http", listening)
    return join_target(_WILDCARDS.get(host, host), port)
