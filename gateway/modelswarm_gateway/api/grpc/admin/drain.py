"""One call of `Swarm.Drain`: begins or undoes a drain, and reports its progress until the server is empty.

Used by the gRPC API. The drain continues when its caller disconnects. Knows no sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.errors import gateway_stopping, invalid_request
from modelswarm_gateway.runtime.drains import Drains, blocks_uncovered, drain_cancelled

# Seconds between two looks at a drained server.
POLL_SECONDS = 0.1
# Longest wait for other servers of the same blocks, in seconds: a day.
MAX_WAIT_SECONDS = 86400
# Further polls that must find the server empty: sessions sent before the drain was known may still arrive.
EMPTY_POLLS = 3


async def run_drain(
    drains: Drains, request: api_pb2.DrainRequest, accepting: Callable[[], bool]
) -> AsyncIterator[api_pb2.DrainProgress]:
    """Yield the drain's state at each change, up to the last one.

    Raise ApiError: a wait out of range, no such server, blocks that no other server holds in time, or an undone drain.
    """
    if not 0 <= request.wait_seconds <= MAX_WAIT_SECONDS:  # NaN neither
        detail = f"wait_seconds: must be from 0 to {MAX_WAIT_SECONDS}, not {request.wait_seconds:g}"
        raise invalid_request("wait_seconds", detail)
    peer = drains.find_server(request.server)
    if request.undo:
        drains.undrain_server(peer)
        yield _drain_state(drains, peer)
        return
    async for state in _await_coverage(drains, peer, request.wait_seconds):
        yield state
    drains.drain_server(peer)
    last: api_pb2.DrainProgress | None = None
    empty = 0
    while last is None or not last.done:
        if not accepting():
            raise gateway_stopping()
        now = _drain_state(drains, peer)
        empty = empty + 1 if now.done else 0
        now.done = now.gone or empty > EMPTY_POLLS
        if not now.gone and drains.is_cancelled(peer):
            raise drain_cancelled(peer)
        if now != last:
            yield now
            last = now
        if not now.done:
            await asyncio.sleep(POLL_SECONDS)


async def _await_coverage(
    drains: Drains, peer: PeerId, seconds: float
) -> AsyncIterator[api_pb2.DrainProgress]:
    """Yield states until other servers hold all blocks of `peer`, or it has no link. Raise ApiError after `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    last: api_pb2.DrainProgress | None = None
    while (view := drains.view_server(peer)) is not None and view.sole_blocks:
        if asyncio.get_running_loop().time() >= deadline:
            raise blocks_uncovered(peer, view.sole_blocks)
        now = _drain_state(drains, peer)
        if now != last:
            yield now
            last = now
        await asyncio.sleep(POLL_SECONDS)


def _drain_state(drains: Drains, peer: PeerId) -> api_pb2.DrainProgress:
    view = drains.view_server(peer)
    if view is None:
        gone = drains.is_gone(peer)
        return api_pb2.DrainProgress(peer=peer, done=gone, gone=gone)
    return api_pb2.DrainProgress(
        peer=peer,
        own_sessions=view.hops,
        other_sessions=view.other_hops,
        migrating=view.migrating,
        uncovered_blocks=view.sole_blocks,
        done=drains.is_empty(peer),
    )
