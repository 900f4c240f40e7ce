"""Bugs on purpose in what gateways do besides the loop: waking beside who has taken over (R19, R20), and spreading
sessions anew (R13).

As in `protocol.py`: subclasses of the real cores, one rule broken in each.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import SessionInfo
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.migration import REBALANCE_CAUSE, Migration
from modelswarm_gateway.core.migration.migrations import Migrations
from modelswarm_gateway.core.sessions.session import Session
from modelswarm_gateway.core.takeover.ownership_check import OwnershipCheck
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


class SoundSleep(OwnershipCheck):
    """What servers say of who has a session now is not heard."""

    def is_lost(self, session: Session, found: SessionInfo) -> bool:
        return False


class WakesAndGoesOn(GatewayCore):
    """R20: a gateway that slept believes that its sessions are its own wherever no Fence says otherwise."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, peer, incarnation, draw)
        self._ownership_check.__class__ = SoundSleep


class LongLease(Fencing):
    """A lease that was over runs on when its gateway speaks again."""

    def on_lease_lapsed(self, gateway: PeerId) -> None:
        pass


class LeasesComeBack(ServerCore):
    """R20: who wakes keeps the hops that an adopter has not fenced yet, although it has lost the others."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._fencing.__class__ = LongLease


class StubbornShifts(Migrations):
    """A session that is to even out loads goes over whatever has become of it meanwhile."""

    def _is_current(self, migration: Migration) -> bool:
        return migration.cause == REBALANCE_CAUSE or super()._is_current(migration)


class BalancesBlindly(GatewayCore):
    """R13: who moves a session to even out loads does not look whether it still stands."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, peer, incarnation, draw)
        self.migrations.__class__ = StubbornShifts
