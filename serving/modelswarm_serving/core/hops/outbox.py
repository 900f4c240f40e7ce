"""The effects of the server core, in order, and the messages that the server sends to itself.

Used by all modules of the core. A server may appear twice in a route: messages to itself never reach a link, they go
through `loopback`. Knows no links.
"""

from __future__ import annotations

from collections import Counter, deque

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import (
    FaultKind,
    FaultReport,
    Item,
    Lane,
    Send,
    reply_address,
)
from modelswarm_serving.core.hops.hop import Fault, Hop
from modelswarm_serving.core.hops.peers import Peers


class Outbox:
    def __init__(self, own: PeerId, peers: Peers) -> None:
        self._own = own
        self._peers = peers
        self._sends: list[Send] = []
        self.loopback: deque[Item] = deque()
        self.reports: Counter[FaultKind] = Counter()

    def send(self, to: Address, lane: Lane, item: Item) -> None:
        if to.peer == self._own:
            self.loopback.append(item)
        else:
            self._sends.append(Send(to, lane, item))

    def send_to_gateway(self, gateway: PeerId, item: Item, lane: Lane = Lane.LIVE) -> None:
        """Send to a gateway. Messages to a lost gateway are dropped: when it reconnects, it fences its sessions."""
        if not self._peers.is_gone(gateway):
            self._sends.append(Send(reply_address(gateway), lane, item))

    def report_fault(self, hop: Hop, peer: PeerId, fault: Fault) -> None:
        self.reports[fault.kind] += 1
        generation = self._peers.generation(peer) if peer else 0
        report = FaultReport(
            hop.gateway_handle, hop.epoch, fault.kind, peer, generation, fault.detail
        )
        self.send_to_gateway(hop.gateway, report)

    def take_sends(self) -> list[Send]:
        sends, self._sends = self._sends, []
        return sends
