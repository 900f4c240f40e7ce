"""Session lookups of other gateways: the owner of a session, its remaining hops, and its log (R20, takeover).

Used by `server.py`. Changes only how long a log is kept: a session is taken over by Fence alone (`ownership.py`). Two
gateways could open a new name at once on different servers, and no Fence would show it. So the first gateway that
claims a name here keeps the claim for 2 s, and the other one is told.
"""

from __future__ import annotations

from dataclasses import replace

from modelswarm.protocol.identity import NO_EPOCH, PeerId
from modelswarm.protocol.messages import (
    FindSession,
    HopInfo,
    Lane,
    LogChunk,
    LogRequest,
    SessionInfo,
)
from modelswarm.protocol.opaque import join_rows, split_entries
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.hops.hop_table import HopTable
from modelswarm_serving.core.hops.outbox import Outbox
from modelswarm_serving.core.hops.peers import Peers

CHUNK_TOKENS = 8192
"""Log entries of one LogChunk: at most 40 KiB on the wire, so that they delay nothing for long."""
CHUNK_ROW_BYTES = 128 << 10
"""Rows of opaque entries in one LogChunk."""
CLAIM_SECONDS = 2.0
"""A claim ends this long after the claimant's last FindSession: its Fences follow after one or two round trips."""


class SessionLookup:
    def __init__(self, hops: HopTable, peers: Peers, out: Outbox) -> None:
        self._hops = hops
        self._peers = peers
        self._outbox = out
        self._claims: dict[
            str, tuple[PeerId, float]
        ] = {}  # session -> claimant and end of the claim, the oldest first

    def on_request(self, peer: PeerId, item: FindSession | LogRequest, now: float) -> None:
        if isinstance(item, FindSession):
            self._answer_find(peer, item, now)
        else:
            self._send_log(peer, item, now)

    def _answer_find(self, peer: PeerId, find: FindSession, now: float) -> None:
        """Send SessionInfo. Hops that did not follow the newest started epoch are left out: they may have missed a
        rewind."""
        hops = self._hops_of(find.session)
        if not hops:
            claimant = self._claimant(peer, find, now)
            self._outbox.send_to_gateway(
                peer,
                SessionInfo(find.session, NO_EPOCH, claimant=claimant, search_id=find.search_id),
            )
            return
        newest, ran = hops[0], hops[0].newest_run_epoch
        owner = newest.gateway
        silent, lease = self._peers.silent_seconds(owner, now), self._peers.lease_seconds(owner)
        owner_linked = silent < lease and self._peers.is_linked(owner)
        if owner_linked and owner != peer:  # the asker sends its client there, and needs no claim
            find = replace(find, claims=False)
        found = SessionInfo(
            session=find.session,
            epoch=newest.epoch,
            owner=owner,
            target=self._peers.target_of(owner),
            owner_linked=owner_linked,
            owner_silent_ms=1000 * silent,
            lease_ms=1000 * lease,
            hops=tuple(_hop_info(hop) for hop in hops if ran in (hop.newest_run_epoch, hop.epoch)),
            last_started=None if ran == NO_EPOCH else ran,
            claimant=self._claimant(peer, find, now),
            search_id=find.search_id,
        )
        self._outbox.send_to_gateway(peer, found)

    def _claimant(self, peer: PeerId, find: FindSession, now: float) -> PeerId:
        """Return the gateway that claimed the name first, if it is another one and linked, else "".

        Its messages may wait here while this process is stalled, so stalled time does not count.
        """
        now = self._peers.elapsed(now)
        first, expires = self._claims.get(find.session, (peer, now))
        if first != peer and now < expires and self._peers.is_linked(first):
            return first
        if find.claims:
            self._claims.pop(find.session, None)
            while self._claims and next(iter(self._claims.values()))[1] <= now:
                del self._claims[next(iter(self._claims))]
            self._claims[find.session] = (peer, now + CLAIM_SECONDS)
        return ""

    def _send_log(self, peer: PeerId, request: LogRequest, now: float) -> None:
        """Send the longest log of that epoch in chunks; one empty chunk if there is none.

        The asking gateway may be lost before its Fence comes, so the log is kept for the next one.
        """
        hops = self._hops_of(request.session)
        epoch = request.epoch or max((hop.epoch for hop in hops), default=NO_EPOCH)
        hops = [hop for hop in hops if hop.epoch == epoch]
        if not hops:
            self._outbox.send_to_gateway(
                peer, LogChunk(request.session, NO_EPOCH, 0, 0, ()), Lane.BULK
            )
            return
        hop = max(hops, key=lambda hop: hop.durable_log)
        log, hop.kept_since = hop.log[: hop.durable_log], self._peers.elapsed(now)
        ranges = split_entries(0, len(log), hop.opaque, CHUNK_TOKENS, CHUNK_ROW_BYTES)
        for start, end in list(ranges) or [(0, 0)]:
            chunk = LogChunk(
                session=hop.session,
                epoch=hop.epoch,
                start=start,
                total=len(log),
                tokens=tuple(log[start:end]),
                turn=None if start else hop.turn,
                rows=join_rows(hop.opaque, start, end),
            )
            self._outbox.send_to_gateway(peer, chunk, Lane.BULK)

    def _hops_of(self, session: str) -> list[Hop]:
        """Return the hops of a session, the highest rank first (R20, ownership)."""
        hops = [hop for hop in self._hops if hop.session == session]
        return sorted(hops, key=lambda hop: hop.rank, reverse=True)


def _hop_info(hop: Hop) -> HopInfo:
    return HopInfo(hop.first, hop.last, hop.kv, hop.durable_log, hop.epoch)
