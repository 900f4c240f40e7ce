"""Drains of servers for the API: find the server, begin or undo the drain, report its progress.

Used by the gRPC API. The core migrates the sessions (`core/migration/migrations.py`) and spreads the drain request to
other gateways (`core/migration/drain_requests.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.placement.spans import format_blocks
from modelswarm.protocol.identity import PeerId, name_of
from modelswarm.protocol.messages import DrainState
from modelswarm_gateway.core.interface.views import ServerView
from modelswarm_gateway.core.migration.migration import DrainProgress
from modelswarm_gateway.errors import ApiError, Code, shorten
from modelswarm_gateway.runtime.core_driver import CoreDriver


class Drains:
    def __init__(
        self,
        driver: CoreDriver,
        may_be_running: Callable[[PeerId], bool],
    ) -> None:
        """`may_be_running` tells whether a server without a link may still be running."""
        self._driver, self._core = driver, driver.core
        self._may_be_running = may_be_running

    def find_server(self, name: str) -> PeerId:
        """Return the linked server with that name, as `modelswarm status` shows it, or peer id. Raise ApiError."""
        servers = self._core.server_views()
        found = [view.peer for view in servers if name in (view.peer, name_of(view.peer))]
        if not found:
            raise ApiError(Code.SERVER_NOT_FOUND, _unknown(name, servers), param="server")
        return found[-1]  # of two incarnations of one server, the later one

    def drain_server(self, peer: PeerId) -> None:
        self._driver.call(self._core.drain_requests.request, peer, DrainState.DRAIN)

    def undrain_server(self, peer: PeerId) -> None:
        self._driver.call(self._core.drain_requests.request, peer, DrainState.SERVE)

    def is_cancelled(self, peer: PeerId) -> bool:
        return not self._core.drain_requests.is_requested(peer)

    def is_empty(self, peer: PeerId) -> bool:
        """Return True when no session is left and all gateways know that none may be added."""
        view = self.view_server(peer)
        if view is None or not view.draining or not self._core.drain_requests.is_acknowledged(peer):
            return False
        return view.is_empty and not view.hops

    def view_server(self, peer: PeerId) -> DrainProgress | None:
        """Return the progress of the drain; None if the server has no link."""
        return self._core.migrations.drain_progress(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Return True if the server has stopped. One that only this gateway lost may have sessions of others."""
        return self.view_server(peer) is None and not self._may_be_running(peer)


def blocks_uncovered(peer: PeerId, blocks: Sequence[int]) -> ApiError:
    holds = f"{name_of(peer)} is the only server that holds blocks {format_blocks(blocks)}"
    detail = f"{holds}: start another server for them first"
    return ApiError(Code.BLOCKS_UNCOVERED, detail, param="server")


def drain_cancelled(peer: PeerId) -> ApiError:
    detail = f"{name_of(peer)} is used again: its drain was undone"
    return ApiError(Code.DRAIN_UNDONE, detail, param="server")


def _unknown(name: str, servers: Sequence[ServerView]) -> str:
    known = sorted({name_of(view.peer) for view in servers})
    shown = ", ".join(known) if known else "none is linked"
    return f"there is no server {shorten(name)!r}; known are: {shown}"
