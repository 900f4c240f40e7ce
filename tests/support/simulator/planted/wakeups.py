"""Planted bugs that lose a message inside the recovery loop: all tokens are right, and a session waits for a deadline.

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

from typing_extensions import override

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence, Refusal
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.sessions.session import Hop, Session
from modelswarm_serving.core.fencing import Fencing
from modelswarm_serving.core.hops.hop import Hop as ServerHop


class AcknowledgesIdleHopsOnly(Fencing):
    """R2 (fencing): a Fence that had to wait for a step is applied, but not acknowledged."""

    _in_fence = False

    @override
    def on_fence(self, peer: PeerId, fence: Fence, now: float) -> None:
        self._in_fence = True
        super().on_fence(peer, fence, now)
        self._in_fence = False

    @override
    def _acknowledge(
        self, hop: ServerHop, refusal: Refusal | None, *, paused: bool = False
    ) -> None:
        if self._in_fence:
            super()._acknowledge(hop, refusal, paused=paused)


class DoesNotRecreateHops(Recovery):
    """R5 (one loop): the loop waits for a hop that its server does not know, and does not create it again."""

    @override
    def _on_unknown_hop(self, session: Session, hop: Hop, now: float) -> None:
        hop.forget(session.epoch)
        hop.fence_epoch = session.epoch  # as if its create had been sent
