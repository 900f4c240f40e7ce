"""Planted bugs in the rules for rows, fences, credit, lanes and handles, and in the codec.

Each class is a product class with one rule broken and nothing else; product code has no switch for any of them. A bug
of the codec is a function.
`catalog.py` names them all and the scenario that finds each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from support.simulator.network import over_wire
from typing_extensions import override

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import (
    Close,
    FaultKind,
    FaultReport,
    Fence,
    Input,
    Item,
    OwnedSessions,
    PromptLogprobs,
    Rows,
    Send,
    StartEpoch,
    Token,
    Window,
)
from modelswarm.protocol.wire import swarm_pb2
from modelswarm.protocol.wire.codec import decode, encode
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, SessionState
from modelswarm_serving.core.hops.hop import Hop, Phase
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape

# -- servers: rows and lanes ---------------------------------------------------------------------


class AcceptsAnyEpoch(ServerCore):
    """R1 (rows never truncate): rows, tokens, windows and inputs of other epochs are not dropped."""

    @override
    def _hop_in_epoch(self, item: Rows | Token | Window | Input) -> Hop | None:
        hop = self._fencing.hops.get(item.handle)
        return None if hop is None or hop.phase is Phase.STOPPED else hop


class AcceptsRowsTwice(ServerCore):
    """R1 (rows never truncate): rows below `received` are taken as new ones."""

    @override
    def _on_rows(self, peer: PeerId, rows: Rows, now: float) -> None:
        hop = self._hop_in_epoch(rows)
        if hop is not None and hop.started is not None and rows.first < hop.received:
            rows = replace(rows, first=hop.received)
        super()._on_rows(peer, rows, now)


class IgnoresGaps(ServerCore):
    """R1 (rows never truncate): rows above `received` are taken as the missing ones."""

    @override
    def _on_rows(self, peer: PeerId, rows: Rows, now: float) -> None:
        hop = self._hop_in_epoch(rows)
        if hop is not None and hop.started is not None and rows.first > hop.received:
            rows = replace(rows, first=hop.received)
        super()._on_rows(peer, rows, now)


class MixesLanes(ServerCore):
    """R9 (one lane at a time): live rows do not wait until all rows on bulk are acknowledged."""

    @override
    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        super()._on_start_epoch(peer, message, now)
        if hop is not None and hop.started is message:
            hop.acked = message.length


class MixesLanesAndIgnoresGaps(MixesLanes, IgnoresGaps):
    """R1 (rows never truncate) and R9 (one lane at a time) together: no gap arises while R9 holds."""


class EarlyTail(Hop):
    """R10 (nothing overtakes StartEpoch): a tail that takes the missing end of its log copy to be zeros."""

    __slots__ = ()

    @override
    def ready_end(self) -> int:
        log = self.log
        if self.started is not None and self.is_tail and not self.is_head:
            self.log = [*log, *[0] * (self.started.length - len(log))]
        end = super().ready_end()
        self.log = log
        return end


class TailDoesNotWait(ServerCore):
    """R10 (nothing overtakes StartEpoch): the tail takes rows >= n before its log copy has L entries."""

    @override
    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None:
            hop.__class__ = EarlyTail
        super()._on_start_epoch(peer, message, now)


class DropsEarlyWindows(ServerCore):
    """R10 (nothing overtakes StartEpoch): a window that arrives before StartEpoch is dropped."""

    @override
    def _on_window(self, peer: PeerId, window: Window, now: float) -> None:
        hop = self._hop_in_epoch(window)
        if hop is None or hop.started is not None:
            super()._on_window(peer, window, now)


class DropsEarlyInputs(ServerCore):
    """R10 (nothing overtakes StartEpoch): an input that arrives before StartEpoch is dropped."""

    @override
    def _on_input(self, peer: PeerId, entries: Input, now: float) -> None:
        hop = self._hop_in_epoch(entries)
        if hop is None or hop.started is not None:
            super()._on_input(peer, entries, now)


class IgnoresWindows(ServerCore):
    """R11 (windows): rows are sent without a window of the successor."""

    @override
    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None and message.successor is not None:
            hop.window = NO_TRUNCATION
        super()._on_start_epoch(peer, message, now)


class IgnoresCredit(ServerCore):
    """R7 (credit): the tail sends tokens whatever its credit is."""

    @override
    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        super()._on_start_epoch(peer, replace(message, credit=NO_TRUNCATION), now)


# -- servers: fences and handles -----------------------------------------------------------------


class SameHandlesEveryBoot(ServerCore):
    """R2 (fencing): handles are small numbers that a restarted server gives out again."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, itertools.count(1).__next__)


class StartsTwice(ServerCore):
    """R2 (fencing): a second StartEpoch of an epoch starts it again."""

    @override
    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None and hop.epoch == message.epoch and hop.phase is Phase.RUNNING:
            self._scheduler.remove_hop(hop)
            hop.phase = Phase.FENCED
        super()._on_start_epoch(peer, message, now)


class TruncatesTwice(ServerCore):
    """R2 (fencing): a second Fence of an epoch truncates again."""

    @override
    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        if isinstance(item, Fence) and hop is not None and hop.epoch == item.epoch:
            hop.epoch = Epoch(item.epoch.counter - 1, item.epoch.gateway)
        super()._dispatch(peer, item, now)


class ObeysOldFences(ServerCore):
    """R2 (fencing): a Fence of a lower epoch is not ignored."""

    @override
    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        if isinstance(item, Fence) and hop is not None and hop.epoch > item.epoch:
            hop.epoch = Epoch(item.epoch.counter - 1, item.epoch.gateway)
        super()._dispatch(peer, item, now)


class TruncatesDuringStep(ServerCore):
    """R2 (fencing): the truncation does not wait for the end of the running step."""

    @override
    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        super()._dispatch(peer, item, now)
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        if hop is not None and hop.in_step and hop.pending_fence is not None:
            self._fencing.apply_pending_fence(hop, now)


class SilentAboutLinks(ServerCore):
    """R5 (one loop): a hop whose link broke reports nothing."""

    @override
    def take_sends(self) -> list[Send]:
        return [
            send
            for send in super().take_sends()
            if not isinstance(send.item, FaultReport) or send.item.kind is not FaultKind.LINK_DOWN
        ]


class IgnoresOwnedSessions(ServerCore):
    """I5 (no leak): hops that their gateway no longer lists in OwnedSessions are not freed."""

    @override
    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        if not isinstance(item, OwnedSessions):
            super()._dispatch(peer, item, now)


# -- gateways ----------------------------------------------------------------------------------


class ForgetsKvLimits(GatewayCore):
    """R3 (lowest cuts): a Fence carries the present KV cut, not the lowest since the hop's last FenceAck."""

    @override
    def take_effects(self) -> list[Effect]:
        return [self._replace_cuts(effect) for effect in super().take_effects()]

    def _replace_cuts(self, effect: Effect) -> Effect:
        if isinstance(effect, Send) and isinstance(effect.item, Fence):
            found = self._recovery.hops.by_handle.get(effect.item.gateway_handle)
            if found is not None:
                return replace(effect, item=self._with_present_cut(effect.item, found[0].length))
        return effect

    def _with_present_cut(self, fence: Fence, length: int) -> Fence:
        return replace(fence, kv_cut=length - 1)


class ForgetsLogLimits(ForgetsKvLimits):
    """R3 (lowest cuts): the same for the cut of the log copy."""

    @override
    def _with_present_cut(self, fence: Fence, length: int) -> Fence:
        return replace(fence, log_cut=length)


class ForgetsLimitsOnceSent(GatewayCore):
    """R3 (lowest cuts): cuts are forgotten when a Fence carries them, not when it is acknowledged."""

    @override
    def take_effects(self) -> list[Effect]:
        effects = super().take_effects()
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.item, Fence):
                found = self._recovery.hops.by_handle.get(effect.item.gateway_handle)
                if found is not None:
                    found[1].kv_limit = found[1].log_limit = NO_TRUNCATION
        return effects


class AcceptsLateTokens(GatewayCore):
    """R4 (freeze): tokens of older epochs count, also inside the recovery loop."""

    @override
    def _on_token(self, peer: PeerId, token: Token, now: float) -> None:
        found = self._recovery.hops.by_handle.get(token.handle)
        if found is None:
            return
        session = found[0]
        fencing = session.state is SessionState.FENCING
        if fencing:
            session.state = SessionState.RUNNING
        super()._on_token(peer, replace(token, epoch=session.epoch), now)
        if fencing and session.state is SessionState.RUNNING:
            session.state = SessionState.FENCING


class IgnoresFailedLinks(GatewayCore):
    """R5 (one loop): a link between two servers that keeps failing is never avoided."""

    @override
    def _on_report(self, peer: PeerId, report: FaultReport, now: float) -> None:
        super()._on_report(peer, replace(report, peer=""), now)


class NeverCloses(GatewayCore):
    """I5 (no leak): hops that a session leaves are not closed."""

    @override
    def take_effects(self) -> list[Effect]:
        return [
            effect
            for effect in super().take_effects()
            if not (isinstance(effect, Send) and isinstance(effect.item, Close))
        ]


# -- the codec ---------------------------------------------------------------------------------


def drops_empty_records(item: Item) -> Item:
    """A record inside a message is not written if all its fields are zero, such as the epoch of an unknown session."""
    if isinstance(item, Rows | Token | PromptLogprobs):
        return over_wire(item)
    envelope = swarm_pb2.Envelope.FromString(encode(item))
    _clear_empty_records(getattr(envelope, envelope.WhichOneof("body") or ""))
    return decode(envelope.SerializeToString())


def _clear_empty_records(proto: Any) -> None:
    for field, value in proto.ListFields():
        if field.message_type and not field.is_repeated:
            if value.ByteSize():
                _clear_empty_records(value)
            else:
                proto.ClearField(field.name)


def shortens_epochs(item: Item) -> Item:
    """The header of rows has one byte for the counter of their epoch."""
    received = over_wire(item)
    if not isinstance(received, Rows):
        return received
    epoch = Epoch(received.epoch.counter & 0xFF, received.epoch.gateway)
    return replace(received, epoch=epoch)
