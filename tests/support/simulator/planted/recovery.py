"""Planted bugs in recovery and detection (R6: replay, R13: migration, R21: failure detection).

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from support.simulator.planted.swap import swap_class
from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence, FenceAck, Item, PromptLogprobs
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migration import Migration
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, Session
from modelswarm_serving.core.server import ServerCore


class CopiesAfterFence(ServerCore):
    """R13 (migration): a KV copy does not end with its epoch."""

    @override
    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        before = None if hop is None else (dict(hop.transfers), dict(hop.transfer_windows))
        super()._dispatch(peer, item, now)
        if hop is not None and before is not None:
            hop.transfers.update(before[0])
            hop.transfer_windows.update(before[1])


class IgnoresRetainedRows(GatewayCore):
    """R6 (replay): retained rows of hops are not used, so all rows are computed again."""

    @override
    def receive(self, peer: PeerId, item: Item, now: float) -> None:
        super().receive(
            peer, replace(item, retained=()) if isinstance(item, FenceAck) else item, now
        )


class CutsOverParkedSessions(Migrations):
    """R13 (migration): a session cuts over to a hop that opened after its turn ended, and runs on."""

    _handles_ack = False

    @override
    def on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        self._handles_ack = True
        super().on_fence_ack(peer, answer, now)
        self._handles_ack = False

    @override
    def _is_current(self, migration: Migration) -> bool:
        return self._handles_ack or super()._is_current(migration)


class NeverSuspects(GatewayCore):
    """R21 (failure detection): no silence is too long, and no token is overdue."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        never = replace(settings, suspect_after_seconds=math.inf, token_timeout_seconds=math.inf)
        super().__init__(never, peer, incarnation, draw)


class NeverOverdue(GatewayCore):
    """R21 (failure detection): no token is overdue, so a link that loses one direction is found when it breaks."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(replace(settings, token_timeout_seconds=math.inf), peer, incarnation, draw)


class KeepsUnscoredKv(Recovery):
    """R6 (replay): after a fault in a prompt the tail keeps the KV of rows whose log probabilities were lost."""

    @override
    def enter_loop(self, session: Session, now: float) -> None:
        scored, session.scored = session.scored, NO_TRUNCATION
        super().enter_loop(session, now)
        session.scored = scored


class LosesScores(GatewayCore):
    """R1 (rows never truncate) and R6 (replay): later log probabilities of a prompt are taken for the missing ones."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, peer, incarnation, draw)
        swap_class(self._recovery, KeepsUnscoredKv)

    @override
    def _on_prompt_logprobs(self, peer: PeerId, item: PromptLogprobs, now: float) -> None:
        s = self._session_of_tail(peer, item)
        if s is not None and item.start > s.scored:
            item = replace(item, start=s.scored)
        super()._on_prompt_logprobs(peer, item, now)
