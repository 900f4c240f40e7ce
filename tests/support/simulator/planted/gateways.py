"""Planted bugs in takeover between gateways (R19: leases, R20: takeover).

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import SessionInfo
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.recovery.ownership_check import OwnershipCheck
from modelswarm_gateway.core.sessions.session import Session


class KeepsSessionsAfterStall(OwnershipCheck):
    """R19 (leases): after a stall the gateway ignores what servers say of the owners of its sessions."""

    @override
    def is_lost(self, session: Session, peer: PeerId, found: SessionInfo) -> bool:
        super().is_lost(session, peer, found)
        return False


class TrustsNewestEpochOnly(GatewayCore):
    """R20 (takeover): only hops of the highest epoch count, although it was fenced in part and never ran."""

    @override
    def take_effects(self) -> list[Effect]:
        return [self._keep_newest(effect) for effect in super().take_effects()]

    def _keep_newest(self, effect: Effect) -> Effect:
        if not isinstance(effect, SessionLocation):
            return effect
        holders = tuple(holder for holder in effect.log_holders if holder.epoch == effect.epoch)
        return replace(effect, log_holders=holders)
