"""Bugs on purpose: the real cores with one rule of the protocol switched off, to prove that the oracles would see it.

Each is a subclass that breaks one rule and nothing else. Product code has no switch for any of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

from support.simulator.actors.server_process import Cores
from support.simulator.planted.gateways import (
    BalancesBlindly,
    LeasesComeBack,
    WakesAndGoesOn,
)
from support.simulator.planted.isolation import FailsTogether, LetsAllCome
from support.simulator.planted.recovery import (
    ForgetsKeptRows,
    MixesBoundaries,
    MovesWhatRests,
    NeverOverdue,
    NeverSuspects,
    TrustsTheNewestOnly,
)
from support.simulator.planted.replay_log import (
    KeepsCutRows,
    KeepsRowsWithHoles,
    SendsOtherKeptRows,
)
from support.simulator.planted.wakeups import AsksNotAgain, ForgetsLateAnswers

from modelswarm.protocol.identity import Epoch, PeerId
from modelswarm.protocol.messages import (
    Close,
    FaultKind,
    FaultReport,
    Fence,
    Input,
    Item,
    OwnedSessions,
    Rows,
    Send,
    StartEpoch,
    Token,
    Window,
)
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.sessions.session import NO_TRUNCATION, SessionState
from modelswarm_serving.core.hops.hop import Hop, Phase
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape

# -- servers -----------------------------------------------------------------------------------


class TakesAnyEpoch(ServerCore):
    """R1: rows, tokens, windows and inputs of other epochs are not dropped."""

    def _hop_in_epoch(self, item: Rows | Token | Window | Input) -> Hop | None:
        hop = self._fencing.hops.get(item.handle)
        return None if hop is None or hop.phase is Phase.STOPPED else hop


class TakesRowsTwice(ServerCore):
    """R1: rows below `received` are taken like new ones."""

    def _on_rows(self, peer: PeerId, rows: Rows, now: float) -> None:
        hop = self._hop_in_epoch(rows)
        if hop is not None and hop.started is not None and rows.first < hop.received:
            rows = replace(rows, first=hop.received)
        super()._on_rows(peer, rows, now)


class OverlooksGaps(ServerCore):
    """R1: rows above `received` are taken as if nothing were missing."""

    def _on_rows(self, peer: PeerId, rows: Rows, now: float) -> None:
        hop = self._hop_in_epoch(rows)
        if hop is not None and hop.started is not None and rows.first > hop.received:
            rows = replace(rows, first=hop.received)
        super()._on_rows(peer, rows, now)


class MixesLanes(ServerCore):
    """R9: live rows do not wait until everything on bulk is acknowledged."""

    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        super()._on_start_epoch(peer, message, now)
        if hop is not None and hop.started is message:
            hop.acked = message.length


class MixesLanesAndOverlooksGaps(MixesLanes, OverlooksGaps):
    """R1's gap and R9 together: no gap arises while R9 holds."""


class ImpatientTail(Hop):
    __slots__ = ()

    def ready_end(self) -> int:
        log = self.log
        if self.started is not None and self.is_tail and not self.is_head:
            self.log = [*log, *[0] * (self.started.length - len(log))]
        end = super().ready_end()
        self.log = log
        return end


class TailDoesNotWait(ServerCore):
    """R10: the tail takes rows >= n before its log copy has L entries."""

    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None:
            hop.__class__ = ImpatientTail
        super()._on_start_epoch(peer, message, now)


class ForgetsEarlyWindows(ServerCore):
    """R10: a window that outran Go is dropped."""

    def _on_window(self, peer: PeerId, window: Window, now: float) -> None:
        hop = self._hop_in_epoch(window)
        if hop is None or hop.started is not None:
            super()._on_window(peer, window, now)


class ForgetsEarlyInputs(ServerCore):
    """R10: an input that outran Go is dropped."""

    def _on_input(self, peer: PeerId, entries: Input, now: float) -> None:
        hop = self._hop_in_epoch(entries)
        if hop is None or hop.started is not None:
            super()._on_input(peer, entries, now)


class IgnoresWindows(ServerCore):
    """R11: rows are sent without the successor's leave."""

    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None and message.successor is not None:
            hop.window = NO_TRUNCATION
        super()._on_start_epoch(peer, message, now)


class IgnoresCredit(ServerCore):
    """R7: the tail releases tokens whatever the credit."""

    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        super()._on_start_epoch(peer, replace(message, credit=NO_TRUNCATION), now)


class SameHandlesEveryBoot(ServerCore):
    """Handles are small numbers that a restarted server gives out again."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, itertools.count(1).__next__)


class GoesTwice(ServerCore):
    """R2: a second Go of an epoch is followed again."""

    def _on_start_epoch(self, peer: PeerId, message: StartEpoch, now: float) -> None:
        hop = self._fencing.hops.get(message.handle)
        if hop is not None and hop.epoch == message.epoch and hop.phase is Phase.RUNNING:
            self._scheduler.remove_hop(hop)
            hop.phase = Phase.FENCED
        super()._on_start_epoch(peer, message, now)


class CutsTwice(ServerCore):
    """R2: a second Fence of an epoch cuts again."""

    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        if isinstance(item, Fence) and hop is not None and hop.epoch == item.epoch:
            hop.epoch = Epoch(item.epoch.counter - 1, item.epoch.gateway)
        super()._dispatch(peer, item, now)


class ObeysOldFences(ServerCore):
    """R2: a Fence of a lower epoch is not ignored."""

    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        if isinstance(item, Fence) and hop is not None and hop.epoch > item.epoch:
            hop.epoch = Epoch(item.epoch.counter - 1, item.epoch.gateway)
        super()._dispatch(peer, item, now)


class CutsDuringAStep(ServerCore):
    """R2: the cut does not wait until the step that is running retires."""

    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        super()._dispatch(peer, item, now)
        hop = self._fencing.hops.get(item.handle) if isinstance(item, Fence) else None
        if hop is not None and hop.in_step and hop.pending_fence is not None:
            self._fencing.apply_pending_fence(hop, now)


class SilentAboutLinks(ServerCore):
    """R5: a hop whose link broke says nothing."""

    def take_sends(self) -> list[Send]:
        return [
            send
            for send in super().take_sends()
            if not isinstance(send.item, FaultReport) or send.item.kind is not FaultKind.LINK_DOWN
        ]


class IgnoresLive(ServerCore):
    """Live: what the gateway no longer owns is not freed."""

    def _dispatch(self, peer: PeerId, item: Item, now: float) -> None:
        if not isinstance(item, OwnedSessions):
            super()._dispatch(peer, item, now)


# -- gateways ----------------------------------------------------------------------------------


class ForgetsKvCuts(GatewayCore):
    """R3: a Fence carries the present KV cut, not the lowest since the hop's last answer."""

    def take_effects(self) -> list[Effect]:
        return [self._forget_cut(effect) for effect in super().take_effects()]

    def _forget_cut(self, effect: Effect) -> Effect:
        if isinstance(effect, Send) and isinstance(effect.item, Fence):
            found = self._recovery.hops_by_handle.get(effect.item.gateway_handle)
            if found is not None:
                return replace(effect, item=self._changed(effect.item, found[0].length))
        return effect

    def _changed(self, fence: Fence, length: int) -> Fence:
        return replace(fence, kv_cut=length - 1)


class ForgetsLogCuts(ForgetsKvCuts):
    """R3, the log's half."""

    def _changed(self, fence: Fence, length: int) -> Fence:
        return replace(fence, log_cut=length)


class ForgetsCutsOnceSent(GatewayCore):
    """R3: cuts are forgotten when a Fence carries them, not when it is answered."""

    def take_effects(self) -> list[Effect]:
        effects = super().take_effects()
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.item, Fence):
                found = self._recovery.hops_by_handle.get(effect.item.gateway_handle)
                if found is not None:
                    found[1].kv_limit = found[1].log_limit = NO_TRUNCATION
        return effects


class TakesLateTokens(GatewayCore):
    """R4: tokens of older epochs still count, also inside the loop."""

    def _on_token(self, peer: PeerId, token: Token, now: float) -> None:
        found = self._recovery.hops_by_handle.get(token.handle)
        if found is None:
            return
        session = found[0]
        fencing = session.state is SessionState.FENCING
        if fencing:
            session.state = SessionState.RUNNING
        super()._on_token(peer, replace(token, epoch=session.epoch), now)
        if fencing and session.state is SessionState.RUNNING:
            session.state = SessionState.FENCING


class ForgivesPairs(GatewayCore):
    """R5: a pair of servers that can't talk is never avoided."""

    def _on_report(self, peer: PeerId, report: FaultReport, now: float) -> None:
        super()._on_report(peer, replace(report, peer=""), now)


class NeverCloses(GatewayCore):
    """I5: hops that a session leaves are not closed."""

    def take_effects(self) -> list[Effect]:
        return [
            effect
            for effect in super().take_effects()
            if not (isinstance(effect, Send) and isinstance(effect.item, Close))
        ]


@dataclass(frozen=True, slots=True)
class Plant:
    """A bug, the switch that should find it, and how many seeds that may take."""

    cores: Cores
    switch: str
    seeds: int = 100


def in_server(bug: type[ServerCore], switch: str, seeds: int = 100) -> Plant:
    return Plant(Cores(server=bug), switch, seeds)


def in_gateway(bug: type[GatewayCore], switch: str, seeds: int = 100) -> Plant:
    return Plant(Cores(gateway=bug), switch, seeds)


PLANTS: dict[str, Plant] = {
    "R1 takes any epoch": in_server(TakesAnyEpoch, "late"),
    "R1 takes rows twice": in_server(TakesRowsTwice, "duplicates"),
    "R1 and R9 mixes lanes, overlooks gaps": in_server(MixesLanesAndOverlooksGaps, "slow_bulk"),
    "R9 mixes lanes": in_server(MixesLanes, "slow_bulk"),
    "R2 goes twice": in_server(GoesTwice, "slow_readers"),
    "R2 cuts twice": in_server(CutsTwice, "duplicates", 200),
    "R2 obeys old fences": in_server(ObeysOldFences, "duplicates"),
    "R2 cuts during a step": in_server(CutsDuringAStep, "rewinds"),
    "R3 forgets KV cuts": in_gateway(ForgetsKvCuts, "rewinds"),
    "R3 forgets log cuts": in_gateway(ForgetsLogCuts, "rewinds"),
    "R3 forgets cuts once sent": in_gateway(ForgetsCutsOnceSent, "late", 400),
    "R3 keeps rows that were cut": in_server(KeepsCutRows, "rewinds"),
    "R6 keeps rows with holes": in_server(KeepsRowsWithHoles, "evictions"),
    "R6 sends other kept rows": in_server(SendsOtherKeptRows, "kills"),
    "R4 takes late tokens": in_gateway(TakesLateTokens, "late"),
    "R5 forgives pairs": in_gateway(ForgivesPairs, "partition"),
    "R5 silent about links": in_server(SilentAboutLinks, "sparse"),
    "R2 forgets late answers": in_server(ForgetsLateAnswers, "rebuilds", 40),
    "R5 asks not again": in_gateway(AsksNotAgain, "asleep", 40),
    "R6 mixes boundaries": in_server(MixesBoundaries, "reshaped", 300),
    "R6 forgets kept rows": in_gateway(ForgetsKeptRows, "kills"),
    "R13 moves what rests": in_gateway(MovesWhatRests, "rebuilds"),
    "R13 balances blindly": in_gateway(BalancesBlindly, "rebalances", 40),
    "R20 wakes and goes on": in_gateway(WakesAndGoesOn, "asleep", 40),
    "R20 leases come back": in_server(LeasesComeBack, "asleep", 40),
    "R20 trusts the newest only": in_gateway(TrustsTheNewestOnly, "doomed"),
    "R21 never suspects": in_gateway(NeverSuspects, "frozen"),
    "R21 no token is overdue": in_gateway(NeverOverdue, "one_way"),
    "R7 ignores credit": in_server(IgnoresCredit, "slow_readers"),
    "R10 tail does not wait": in_server(TailDoesNotWait, "slow_bulk"),
    "R10 forgets early windows": in_server(ForgetsEarlyWindows, "mixed"),
    "R10 forgets early inputs": in_server(ForgetsEarlyInputs, "sparse"),
    "R11 ignores windows": in_server(IgnoresWindows, "prefill"),
    "the same peer and handles after a restart": Plant(
        Cores(server=SameHandlesEveryBoot, nonce=False), "delays"
    ),
    "R12 lets all come": in_server(LetsAllCome, "bursts"),
    "I7 fails together": in_server(FailsTogether, "poison"),
    "I5 never closes": in_gateway(NeverCloses, "calm"),
    "I5 ignores Live": in_server(IgnoresLive, "drops"),
}
