"""What a gateway that does not own a session can learn of it here: who has it, what is left of it, and its log (R20).

Used by `server.py`. Changes nothing: only a Fence takes a session over, see `ownership.py`.
"""

from __future__ import annotations

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import (
    Find,
    Found,
    FoundHop,
    Lane,
    LogChunk,
    LogRequest,
)
from modelswarm_serving.core.outbox import Outbox
from modelswarm_serving.core.peers import Peers
from modelswarm_serving.core.registry import Registry
from modelswarm_serving.core.session import Hop

CHUNK_TOKENS = 8192
"""Log entries of one LogChunk: at most 40 KiB on the wire, so that they delay nothing for long."""

NOWHERE = Epoch(0, 0)


class Finding:
    def __init__(self, hops: Registry, peers: Peers, out: Outbox) -> None:
        self._hops = hops
        self._peers = peers
        self._out = out

    def asked(self, peer: PeerId, item: Find | LogRequest, now: float) -> None:
        if isinstance(item, Find):
            self._find(peer, item, now)
        else:
            self._log(peer, item)

    def _find(self, peer: PeerId, find: Find, now: float) -> None:
        """Of several routes of the session, its newest: what older ones left here is of no use to anybody."""
        hops = self._newest(find.session)
        if not hops:
            self._out.to_gateway(peer, Found(find.session, NOWHERE))
            return
        owner = hops[0].gateway
        silent, lease = self._peers.silent_for(owner, now), self._peers.lease(owner)
        found = Found(
            session=find.session,
            epoch=hops[0].epoch,
            owner=owner,
            target=self._peers.target(owner),
            linked=silent < lease and self._peers.is_up(owner),
            gone_ms=1000 * silent,
            lease_ms=1000 * lease,
            hops=tuple(FoundHop(hop.first, hop.last, hop.kv, len(_log(hop))) for hop in hops),
        )
        self._out.to_gateway(peer, found)

    def _log(self, peer: PeerId, request: LogRequest) -> None:
        """The longest copy here, in pieces; one piece of nothing if there is none."""
        hops = self._newest(request.session)
        if not hops:
            self._out.to_gateway(peer, LogChunk(request.session, NOWHERE, 0, 0, ()), Lane.BULK)
            return
        hop = max(hops, key=lambda hop: len(_log(hop)))
        log = _log(hop)
        for start in range(0, max(1, len(log)), CHUNK_TOKENS):
            chunk = LogChunk(
                session=hop.session,
                epoch=hop.epoch,
                start=start,
                total=len(log),
                tokens=tuple(log[start : start + CHUNK_TOKENS]),
                turn=None if start else hop.turn,
            )
            self._out.to_gateway(peer, chunk, Lane.BULK)

    def _newest(self, session: str) -> list[Hop]:
        hops = [hop for hop in self._hops if hop.session == session]
        newest = max((hop.epoch for hop in hops), default=NOWHERE)
        return [hop for hop in hops if hop.epoch == newest]


def _log(hop: Hop) -> list[int]:
    """What a cut that waits for a step to retire will leave of it."""
    return hop.log if hop.pending is None else hop.log[: max(0, hop.pending.log_cut)]
