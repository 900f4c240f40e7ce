"""`modelswarm drain`, behind the door: which server is meant, and how far sessions have left it.

Used by the gRPC door. How sessions are moved is the core's (`core/moves.py`), and how other gateways hear of it
(`core/wishes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from modelswarm.protocol.identity import PeerId, name_of
from modelswarm.protocol.messages import DrainState
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.views import ServerView
from modelswarm_gateway.core.migration.migration import DrainProgress
from modelswarm_gateway.errors import ApiError, Code


class Drains:
    def __init__(
        self,
        core: GatewayCore,
        clock: Callable[[], float],
        flush: Callable[[], None],
        may_be_running: Callable[[PeerId], bool],
    ) -> None:
        """`may_live`: whether a server without a link is perhaps still there."""
        self._core, self._clock, self._flush = core, clock, flush
        self._may_be_running = may_be_running

    def find_server(self, name: str) -> PeerId:
        """The linked server of that name, as `modelswarm status` shows it, or of that peer id. Raises ApiError."""
        servers = self._core.servers()
        found = [view.peer for view in servers if name in (view.peer, name_of(view.peer))]
        if not found:
            raise ApiError(Code.SERVER_NOT_FOUND, _unknown(name, servers), param="server")
        return found[-1]  # of two lives of one server, the later one

    def drain_server(self, peer: PeerId) -> None:
        self._core.wishes.request(peer, DrainState.DRAIN, self._clock())
        self._flush()

    def undrain_server(self, peer: PeerId) -> None:
        self._core.wishes.request(peer, DrainState.SERVE, self._clock())
        self._flush()

    def is_cancelled(self, peer: PeerId) -> bool:
        return not self._core.wishes.is_requested(peer)

    def is_empty(self, peer: PeerId) -> bool:
        """Nobody is there any more, and all gateways have heard that nobody is to come."""
        view = self.view_server(peer)
        if view is None or not view.draining or not self._core.wishes.is_acknowledged(peer):
            return False
        return view.is_empty and not view.hops

    def view_server(self, peer: PeerId) -> DrainProgress | None:
        """None: the server has no link."""
        return self._core.moves.drain_progress(peer)

    def is_gone(self, peer: PeerId) -> bool:
        """Others may have sessions on a server that only this gateway has lost."""
        return self.view_server(peer) is None and not self._may_be_running(peer)


def blocks_uncovered(peer: PeerId, blocks: Sequence[int]) -> ApiError:
    which = f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
    detail = f"{name_of(peer)} is the only server that holds {which}: another one has to come first"
    return ApiError(Code.BLOCKS_UNCOVERED, detail, param="server")


def drain_cancelled(peer: PeerId) -> ApiError:
    detail = f"{name_of(peer)} is used again: somebody took the drain back"
    return ApiError(Code.DRAIN_UNDONE, detail, param="server")


def _unknown(name: str, servers: Sequence[ServerView]) -> str:
    known = sorted({name_of(view.peer) for view in servers})
    shown = ", ".join(known) if known else "none is linked"
    return f"there is no server {name!r}; known are: {shown}"
