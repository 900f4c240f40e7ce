"""Bugs on purpose that lose a wake-up inside the loop: nothing is wrong with any token, and somebody waits for ever, or
until a deadline goes around the hop.

As in `protocol.py`, which has the others: subclasses of the real cores, one rule broken in each.
"""

from __future__ import annotations

from collections.abc import Callable

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence, Refusal
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import Hop, Session
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.hops.hop import Hop as ServerHop
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape


class SilentCuts(Fencing):
    """Only what a Fence finds at rest is answered."""

    _asked = False

    def on_fence(self, peer: PeerId, fence: Fence, now: float) -> None:
        self._asked = True
        super().on_fence(peer, fence, now)
        self._asked = False

    def _acknowledge(self, hop: ServerHop, refusal: Refusal | None) -> None:
        if self._asked:
            super()._acknowledge(hop, refusal)


class ForgetsLateAnswers(ServerCore):
    """R2: a cut that had to wait for a step is made, and not answered."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, shape, draw)
        self._fencing.__class__ = SilentCuts


class ResignedRecovery(Recovery):
    """A hop that its server does not know is not asked for anew."""

    def _on_unknown_hop(self, session: Session, hop: Hop, now: float) -> None:
        hop.forget(session.epoch)


class AsksNotAgain(GatewayCore):
    """R5: the loop waits for a hop that has said that it is gone."""

    def __init__(
        self, settings: GatewaySettings, peer: PeerId, incarnation: int, draw: Callable[[], int]
    ) -> None:
        super().__init__(settings, peer, incarnation, draw)
        self._recovery.__class__ = ResignedRecovery
