"""Bugs that the product once had and that one seed of the simulator found: each class puts one of them back.

Used by `catalog.py`, which ties each bug to its seed. All are subclasses of product classes, as in `protocol.py`.
"""

from __future__ import annotations

from dataclasses import replace

from typing_extensions import override

from modelswarm.protocol.identity import NO_HANDLE, PeerId
from modelswarm.protocol.messages import FenceAck, PromptLogprobs, StartEpoch
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.recovery.fault_attribution import attribute
from modelswarm_gateway.core.recovery.ownership_check import OwnershipCheck
from modelswarm_gateway.core.recovery.recovery import Recovery
from modelswarm_gateway.core.recovery.route_planner import Plan, RoutePlanner
from modelswarm_gateway.core.servers.variant import ModelVariant
from modelswarm_gateway.core.sessions.hop_table import HopTable
from modelswarm_gateway.core.sessions.session import Hop, Session
from modelswarm_serving.core.server import ServerCore

# -- routes and links --------------------------------------------------------------------------


class KeepsUnreliableLinks(RoutePlanner):
    """R5 (one loop): a route is planned again and again over a link that fails each time."""

    @override
    def _avoid_unreliable_links(
        self, session: Session, variant: ModelVariant, excluded: frozenset[PeerId], now: float
    ) -> Plan | None:
        return self._fill_gaps(session, variant, excluded, now)


class CountsEachDirection(Recovery):
    """R5 (one loop): a lost token and then a lost window count as failures of two links, one for each direction."""

    @override
    def _attribute_overdue(self, session: Session, now: float) -> None:
        step_times = self._registry.health.step_times
        idle = {hop.peer for hop in session.hops if not step_times(hop.peer).is_progressing(now)}
        epoch, length = session.overdue_epoch, session.length
        found = () if epoch is None else attribute(session.hops, idle, epoch, length)
        if len(found) != 2:
            super()._attribute_overdue(session, now)
            return
        session.overdue_epoch = None
        sender, receiver = found
        self._registry.on_link_failed(sender, receiver, -1 - int(now / 0.5), now)
        self._replan(session, now)


class IgnoresLostAcknowledgements(Recovery):
    """R5 (one loop): a lost acknowledgement of bulk rows names no link, because it grants no further rows."""

    @override
    def _attribute_overdue(self, session: Session, now: float) -> None:
        for hop in session.hops:
            if hop.counters is not None:
                hop.counters = replace(hop.counters, unsent=0)
        super()._attribute_overdue(session, now)


class IgnoresStepsOfFenceAcks(GatewayCore):
    """R5 (one loop): only heartbeats tell of steps, so a server whose rows came just before the Fence was idle."""

    @override
    def _on_fence_ack(self, peer: PeerId, answer: FenceAck, now: float) -> None:
        super()._on_fence_ack(peer, replace(answer, steps=0), now)


class CountsNoScores(GatewayCore):
    """R21 (failure detection): scores of a prompt are no progress, so its token is overdue while they arrive."""

    @override
    def _on_prompt_logprobs(self, peer: PeerId, item: PromptLogprobs, now: float) -> None:
        found = self._recovery.hops.by_handle.get(item.handle)
        before = 0 if found is None else found[0].result_groups
        super()._on_prompt_logprobs(peer, item, now)
        if found is not None:
            found[0].result_groups = before


# -- the gateway's table of hops ---------------------------------------------------------------


class KeepsRefusedHops(HopTable):
    """I5: a hop that its server refused waits in the table for an answer when it is detached."""

    @override
    def detach(self, hop: Hop) -> None:
        found = self.by_handle.get(hop.gateway_handle)
        super().detach(hop)
        is_refused = hop.server_handle == NO_HANDLE and hop.create_epoch is None
        if found is not None and is_refused and self._registry.is_connected(hop.peer):
            self.by_handle[hop.gateway_handle] = found
            self.closing[hop.gateway_handle] = hop


class AwaitsLostAnswers(HopTable):
    """I5: a create whose answer was lost with its link stays pending."""

    @override
    def forget_peer(self, peer: PeerId) -> None:
        pending = [(hop, hop.create_epoch) for _, hop in self.by_handle.values()]
        super().forget_peer(peer)
        for hop, epoch in pending:
            hop.create_epoch = epoch


# -- sessions that two gateways claim ----------------------------------------------------------


class ForgetsAwaitedServers(OwnershipCheck):
    """R19 (leases): a gateway that is cut off again asks anew, and no longer waits for servers that it lost before."""

    @override
    def awaits_answers(self, session: Session, now: float) -> bool:
        query = session.query
        if query is not None and now >= query.due_at:
            query.unanswered.clear()
        return super().awaits_answers(session, now)


class SilentAboutTakenHops(ServerCore):
    """R20 (takeover): a StartEpoch for a hop that another gateway took over is not answered."""

    @override
    def _reject_unknown(self, peer: PeerId, message: StartEpoch) -> None:
        return
