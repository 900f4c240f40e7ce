"""A hop that is copied by hand (R13, the servers' half), on the hash model."""

from __future__ import annotations

from dataclasses import dataclass, replace

from support.core.network import GATEWAY, Client, Pump, Server, opened

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
    """A new hop beside the route, as the gateway that orders the copy sees it."""

    client: Client
    hop: int
    server: Server
    own: Handle
    reply: int = WARM_REPLY
    fed: int = 0

    @property
    def told(self) -> list[int]:
        """KV that it said it has."""
        return [
            item.received
            for _, item in self.client.pump.answers
            if isinstance(item, Window) and item.handle == self.reply
        ]

    @property
    def reports(self) -> list[FaultReport]:
        return [
            item
            for _, item in self.client.pump.answers
            if isinstance(item, FaultReport) and item.handle == self.reply
        ]

    @property
    def kv(self) -> int:
        return max(self.told, default=0)

    def feed(self) -> None:
        """A new head and a new tail store the log."""
        if self.hop in (0, len(self.client.hops) - 1):
            body = Input(self.own, self.client.epoch, self.fed, tuple(self.client.log[self.fed :]))
            self.client.pump.put(GATEWAY, self.server.address.peer, body)
            self.fed = len(self.client.log)

    def switch(self) -> None:
        _, first, last = self.client.hops[self.hop]
        self.client.hops[self.hop] = (self.server, first, last)
        self.client.own[self.hop] = self.own


def running(pump: Pump, hops: int = 3, **settings: int) -> Client:
    client = opened(pump, hops=hops, length=CONTEXT, new=NEW, **settings)
    client.go(credit=CONTEXT + READ)
    client.finish()
    return client


def opened_beside(client: Client, hop: int, reply: int = WARM_REPLY, **settings: int) -> Spare:
    _, first, last = client.hops[hop]
    pump = client.pump
    server = pump.serve(first, last, **settings)
    create = Create(client.session, first, last, for_recovery=True)
    turn = Turn(client.end - 1, client.end, client.sampling)
    fence = Fence(0, reply, client.epoch, 0, 0, create, turn)
    pump.put(GATEWAY, server.address.peer, fence)
    pump.run()
    own = [
        i.server_handle for _, i in pump.answers if isinstance(i, FenceAck) and i.handle == reply
    ]
    return Spare(client, hop, server, own[-1], reply)


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
    client.pump.put(GATEWAY, spare.server.address.peer, replace(go, **changes))  # type: ignore[arg-type]


def order(spare: Spare, start: int = 0) -> None:
    to = Neighbour(spare.server.address, spare.own)
    client, hop = spare.client, spare.hop
    _, first, last = client.hops[hop]
    client.put(hop, CopyKv(client.own[hop], client.epoch, to, start, first, last))


def deliver_all(pump: Pump) -> None:
    pump.collect()
    for key in [key for key, items in pump.lanes.items() if items]:
        while pump.lanes[key]:
            pump.deliver(key)


def run_without(pump: Pump, idle: Server) -> None:
    """Until nothing moves but the steps of one server."""
    for _ in range(50):
        pump.collect()
        for key in [key for key, items in pump.lanes.items() if items]:
            pump.deliver(key)
        for server in pump.servers.values():
            if server is not idle and server.plan(pump.now):
                server.retire(pump.now)
