"""KV transfer to a new hop, ordered by the test: the servers' half of R13 (migration), on the hash model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

from support.core.scripted_gateway import GATEWAY, Client, ServerNetwork, opened
from support.core.server import Options, Server

from modelswarm.protocol.identity import Handle
from modelswarm.protocol.messages import (
    CopyKv,
    Create,
    FaultReport,
    Fence,
    FenceAck,
    Input,
    Neighbour,
    StartEpoch,
    Turn,
    Window,
)

CONTEXT, NEW, READ = 60, 40, 20
WARM_REPLY = 900


@dataclass
class Spare:
    """A new hop beside the route, as seen by the gateway that orders the copy."""

    client: Client
    hop: int
    server: Server
    own: Handle
    reply: int = WARM_REPLY
    fed: int = 0

    @property
    def received(self) -> list[int]:
        """Return the reported KV positions."""
        return [
            item.received
            for _, item in self.client.network.answers
            if isinstance(item, Window) and item.handle == self.reply
        ]

    @property
    def reports(self) -> list[FaultReport]:
        return [
            item
            for _, item in self.client.network.answers
            if isinstance(item, FaultReport) and item.handle == self.reply
        ]

    @property
    def kv(self) -> int:
        return max(self.received, default=0)

    def feed(self) -> None:
        """Send the log to a new head or a new tail."""
        if self.hop in (0, len(self.client.hops) - 1):
            body = Input(self.own, self.client.epoch, self.fed, tuple(self.client.log[self.fed :]))
            self.client.network.put(GATEWAY, self.server.peer, body)
            self.fed = len(self.client.log)

    def switch(self) -> None:
        _, first, last = self.client.hops[self.hop]
        self.client.hops[self.hop] = (self.server, first, last)
        self.client.own[self.hop] = self.own


def running(network: ServerNetwork, hops: int = 3, **options: Unpack[Options]) -> Client:
    client = opened(network, hops=hops, length=CONTEXT, new=NEW, **options)
    client.resume(credit=CONTEXT + READ)
    return client


def opened_beside(
    client: Client, hop: int, reply: int = WARM_REPLY, **options: Unpack[Options]
) -> Spare:
    _, first, last = client.hops[hop]
    server = client.network.serve(first, last, **options)
    return Spare(client, hop, server, open_hop(client, server, first, last, reply), reply)


def open_hop(
    client: Client, server: Server, first: int, last: int, reply: int = WARM_REPLY
) -> Handle:
    """Create a hop beside the route, and run until the network is idle; return the server's handle."""
    create = Create(client.session, first, last, for_recovery=True)
    turn = Turn(client.end - 1, client.end, client.sampling)
    network = client.network
    network.put(GATEWAY, server.peer, Fence(0, reply, client.epoch, 0, 0, create, turn))
    network.run()
    answers = [
        item for peer, item in network.answers if isinstance(item, FenceAck) and peer == server.peer
    ]
    return answers[-1].server_handle


def warm(spare: Spare, **changes: object) -> None:
    client, hop = spare.client, spare.hop
    go = StartEpoch(
        handle=spare.own,
        epoch=client.epoch,
        length=len(client.log),
        start=0,
        send_from=client.end,
        predecessor=client.neighbour(hop),
        successor=None,
        ring=None,
        credit=0,
        hops=len(client.hops),
        standby=True,
    )
    client.network.put(GATEWAY, spare.server.peer, replace(go, **changes))  # type: ignore[arg-type]


def order(spare: Spare, start: int = 0) -> None:
    to = Neighbour(spare.server.address, spare.own)
    client, hop = spare.client, spare.hop
    _, first, last = client.hops[hop]
    client.put(hop, CopyKv(client.own[hop], client.epoch, to, start, first, last))


def copying(client: Client, hop: int, reply: int = WARM_REPLY, **options: Unpack[Options]) -> Spare:
    """Return a new hop to which the old one is told to copy its KV; nothing is delivered yet."""
    spare = opened_beside(client, hop, reply, **options)
    warm(spare)
    order(spare)
    return spare


def run_without(network: ServerNetwork, idle: Server) -> None:
    """Run until the network is idle, without steps of one server."""
    idle.lazy = True
    network.run()
    idle.lazy = False
