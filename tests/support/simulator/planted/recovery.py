"""Bugs on purpose in what makes recovery quick: which kept rows are used (R6), copies (R13) and suspicion (R21).

As in `protocol.py`, which has those of the loop and of the rows: subclasses of the real cores, one rule broken in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from modelswarm.protocol.identity import Handle, PeerId
from modelswarm.protocol.messages import Fence, FenceAck, Item
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migration import Migration
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_serving.core.hops.replay_log import ReplayLog, Rows
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


class SharedLog(ReplayLog):
    """One run for all hops of a session, at whatever boundary."""

    key_of: Callable[[Handle], Handle]

    def append(self, hop: Handle, first: int, rows: Rows) -> None:
        super().append(self.key_of(hop), first, rows)

    def retained_range(self, hop: Handle) -> tuple[int, int]:
        return super().retained_range(self.key_of(hop))

    def read_rows(self, hop: Handle, start: int, end: int) -> Rows | None:
        return super().read_rows(self.key_of(hop), start, end)

    def drop(self, hop: Handle) -> None:
        super().drop(self.key_of(hop))


class MixesBoundaries(ServerCore):
    """R6: kept rows are found by session, not by boundary."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        log = self._replay_log
        log.__class__ = SharedLog
        assert isinstance(log, SharedLog)
        log.key_of = self._first_of_session

    def _first_of_session(self, handle: Handle) -> Handle:
        hop = self._fencing.hops.get(handle)
        if hop is None:
            return handle
        return next(other.handle for other in self._fencing.hops if other.session == hop.session)


class CopiesOnAndOn(ServerCore):
    """R13: a copy does not end with its epoch."""

    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        kept = None if hop is None else (dict(hop.transfers), dict(hop.transfer_windows))
        super()._dispatch(peer, item, now)
        if hop is not None and kept is not None:
            hop.transfers.update(kept[0])
            hop.transfer_windows.update(kept[1])


class ForgetsKeptRows(GatewayCore):
    """R6: what hops have kept is not used: everything is computed again."""

    def receive(self, peer: PeerId, item: Item, now: float) -> None:
        super().receive(
            peer, replace(item, retained=()) if isinstance(item, FenceAck) else item, now
        )


class RashMoves(Migrations):
    """What has become of the session meanwhile does not matter when its new hop opens."""

    _answering = False

    def on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        self._answering = True
        super().on_fence_ack(peer, answer, now)
        self._answering = False

    def _is_current(self, migration: Migration) -> bool:
        return self._answering or super()._is_current(migration)


class MovesWhatRests(GatewayCore):
    """R13: a session goes over to a hop that opened after its last token, and runs on."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, peer, incarnation, draw)
        self.migrations.__class__ = RashMoves


class NeverSuspects(GatewayCore):
    """R21: silence means nothing."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        never = replace(settings, suspect_after_seconds=math.inf, token_timeout_seconds=math.inf)
        super().__init__(never, peer, incarnation, draw)


class NeverOverdue(GatewayCore):
    """R21: a token may take for ever; a link that swallows rows one way is found when it breaks."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(replace(settings, token_timeout_seconds=math.inf), peer, incarnation, draw)


class TrustsTheNewestOnly(GatewayCore):
    """R20: only hops of the highest epoch count, also if it was fenced in part and never ran."""

    def take_effects(self) -> list[Effect]:
        return [self._newest(effect) for effect in super().take_effects()]

    def _newest(self, effect: Effect) -> Effect:
        if not isinstance(effect, SessionLocation):
            return effect
        holders = tuple(holder for holder in effect.log_holders if holder.epoch == effect.epoch)
        return replace(effect, log_holders=holders)
