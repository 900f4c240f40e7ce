"""What a gateway that does not own a session can learn of it here: who has it, what is left of it, and its log (R20).

Used by `server.py`. Changes nothing but how long a copy is kept: only a Fence takes a session over, see `ownership.py`.
Of two gateways that are about to open a name that nobody has, each on servers of its own, no Fence would tell: so the
first that asks here is the opener for a while, and the other one hears of it.
"""

from __future__ import annotations

from modelswarm.protocol.identity import NO_EPOCH, PeerId
from modelswarm.protocol.messages import (
    Find,
    Found,
    FoundHop,
    Lane,
    LogChunk,
    LogRequest,
)
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.hops.hop_table import Registry
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.peers import Peers

CHUNK_TOKENS = 8192
"""Log entries of one LogChunk: at most 40 KiB on the wire, so that they delay nothing for long."""
OPENER_SECONDS = 2.0  # from the last Find of an opener until its Fences: a round trip or two


class Finding:
    def __init__(self, hops: Registry, peers: Peers, out: Outbox) -> None:
        self._hops = hops
        self._peers = peers
        self._out = out
        self._openers: dict[
            str, tuple[PeerId, float]
        ] = {}  # by session, the oldest first; until when

    def asked(self, peer: PeerId, item: Find | LogRequest, now: float) -> None:
        if isinstance(item, Find):
            self._find(peer, item, now)
        else:
            self._log(peer, item, now)

    def _find(self, peer: PeerId, find: Find, now: float) -> None:
        """What is older than what ran last is of no use to anybody: rewinds that it missed are not known any more."""
        hops, opener = self._of(find.session), self._opener(peer, find, now)
        if not hops:
            self._out.to_gateway(
                peer, Found(find.session, NO_EPOCH, opener=opener, number=find.number)
            )
            return
        newest, ran = hops[0], max(hop.ran for hop in hops)
        owner = newest.gateway
        silent, lease = self._peers.silent_for(owner, now), self._peers.lease(owner)
        found = Found(
            session=find.session,
            epoch=newest.epoch,
            owner=owner,
            target=self._peers.target(owner),
            linked=silent < lease and self._peers.is_up(owner),
            gone_ms=1000 * silent,
            lease_ms=1000 * lease,
            hops=tuple(_told(hop) for hop in hops if hop.epoch == newest.epoch),
            older=tuple(_told(hop) for hop in hops if ran <= hop.epoch < newest.epoch),
            ran=ran,
            opener=opener,
            number=find.number,
        )
        self._out.to_gateway(peer, found)

    def _opener(self, peer: PeerId, find: Find, now: float) -> PeerId:
        """Who was first, if that is another gateway, and linked. What it sends may wait here while this process stands
        still: such time does not count."""
        now = self._peers.awake(now)
        first, until = self._openers.get(find.session, (peer, now))
        if first != peer and now < until and self._peers.is_up(first):
            return first
        if find.opens:
            self._openers.pop(find.session, None)
            while self._openers and next(iter(self._openers.values()))[1] <= now:
                del self._openers[next(iter(self._openers))]
            self._openers[find.session] = (peer, now + OPENER_SECONDS)
        return ""

    def _log(self, peer: PeerId, request: LogRequest, now: float) -> None:
        """The longest copy here of that epoch, in pieces; one piece of nothing if there is none.

        Who asks may be lost before its Fence comes: then the copy is to be there for the next one.
        """
        hops = self._of(request.session)
        epoch = request.epoch or max((hop.epoch for hop in hops), default=NO_EPOCH)
        hops = [hop for hop in hops if hop.epoch == epoch]
        if not hops:
            self._out.to_gateway(peer, LogChunk(request.session, NO_EPOCH, 0, 0, ()), Lane.BULK)
            return
        hop = max(hops, key=lambda hop: len(_log(hop)))
        log, hop.wanted = _log(hop), self._peers.awake(now)
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

    def _of(self, session: str) -> list[Hop]:
        """The newest first."""
        hops = [hop for hop in self._hops if hop.session == session]
        return sorted(hops, key=lambda hop: hop.epoch, reverse=True)


def _told(hop: Hop) -> FoundHop:
    return FoundHop(hop.first, hop.last, hop.kv, len(_log(hop)), hop.epoch)


def _log(hop: Hop) -> list[int]:
    """What a cut that waits for a step to retire will leave of it."""
    return hop.log if hop.pending is None else hop.log[: max(0, hop.pending.log_cut)]
