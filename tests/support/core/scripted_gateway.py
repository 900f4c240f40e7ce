"""A gateway that does only what a test tells it, over real server cores on the in-memory network.

`ServerNetwork` holds servers and their answers to scripted gateways. `Client` is one session of such a gateway: it
fences, sends StartEpoch by the pass of R6 (replay), and reads the answers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Unpack

from support.core.actor import Actor
from support.core.network import Network
from support.core.server import VOCABULARY, Options, Server, expected
from typing_extensions import override

from modelswarm.protocol.identity import NO_HANDLE, Epoch, PeerId
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Close,
    Create,
    FaultReport,
    Fence,
    FenceAck,
    Hello,
    Input,
    Item,
    Lane,
    Neighbour,
    Role,
    Sampling,
    StartEpoch,
    Token,
    Turn,
    Window,
)
from modelswarm_gateway.core.sessions.replay_plan import HopState, restart_points

GATEWAY = "gateway/1/a"
FOREVER = 1 << 40


@dataclass(eq=False)
class ScriptedGateway(Actor):
    answers: list[tuple[PeerId, Item]]  # (server, its item)

    @override
    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        self.answers.append((sender, item))


@dataclass
class ServerNetwork(Network):
    """Servers of six blocks and 64 pages, linked to `GATEWAY`."""

    options: Options = field(default_factory=lambda: Options(n_blocks=6, total_pages=64))
    answers: list[tuple[PeerId, Item]] = field(default_factory=list)  # to all scripted gateways

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        self.add_gateway(GATEWAY)

    def add_gateway(self, peer: PeerId, *, linked: bool = True) -> None:
        hello = Hello(PROTOCOL_VERSION, peer, Role.GATEWAY, "", Lane.LIVE)
        gateway = self.actors[peer] = ScriptedGateway(hello, self.answers)
        if linked:
            self.join(gateway)

    @property
    def free_pages(self) -> list[int]:
        return [server.core.stats.free_pages for server in self.servers.values()]


@dataclass
class Client:
    """One session of the scripted gateway. `hops` are (server, first, last) in route order."""

    network: ServerNetwork
    hops: list[tuple[Server, int, int]]
    log: list[int]
    session: str = "a"
    sampling: Sampling = field(default_factory=Sampling)
    gateway: PeerId = GATEWAY
    epoch: Epoch = field(default_factory=lambda: Epoch(0, 1))
    base: int = 100  # its handles of the hops: base, base + 1, ...
    own: list[int] = field(default_factory=list)
    read: int = 0  # number of answers read
    fenced: dict[int, FenceAck] = field(default_factory=dict)
    reports: list[FaultReport] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)  # of the current epoch
    begin: int = 0
    end: int = 0
    last_started: Epoch | None = None  # the last epoch that was started

    def __post_init__(self) -> None:
        self.own = [NO_HANDLE] * len(self.hops)

    def put(self, hop: int, item: Item, lane: Lane = Lane.LIVE) -> None:
        self.network.put(self.gateway, self.hops[hop][0].peer, item, lane)

    def turn(self, new: int) -> Turn:
        self.begin, self.end = len(self.log), len(self.log) + new
        return Turn(max(self.end - 1, 0), self.end, self.sampling, self.begin)

    def fence(
        self,
        new: int | None = None,
        kv_cut: int | None = None,
        log_cut: int | None = None,
        *,
        repair: bool = False,
    ) -> None:
        """Send a fence to every hop with the next epoch: a cut, a new turn of `new` tokens, or both."""
        self.epoch = Epoch(self.epoch.counter + 1, self.epoch.gateway)
        self.fenced.clear()
        self.tokens.clear()
        turn = None if new is None else self.turn(new)
        length = len(self.log)
        for index, (_, first, last) in enumerate(self.hops):
            create = None
            if self.own[index] == NO_HANDLE:
                create = Create(self.session, first, last, repair)
                again = Turn(self.end - 1, self.end, self.sampling, self.begin)
            fence = Fence(
                handle=self.own[index],
                gateway_handle=self.base + index,
                epoch=self.epoch,
                kv_cut=length - 1 if kv_cut is None else kv_cut,
                log_cut=length if log_cut is None else log_cut,
                create=create,
                turn=again if create is not None else turn,
                last_started=self.last_started,
            )
            self.put(index, fence)

    def refence(
        self,
        new: int | None = None,
        kv_cut: int | None = None,
        log_cut: int | None = None,
        *,
        repair: bool = False,
    ) -> None:
        """Fence, run until the network is idle, and read the answers."""
        self.fence(new, kv_cut, log_cut, repair=repair)
        self.network.run()
        self.listen()

    def listen(self) -> None:
        """Read the new answers for this session."""
        names = range(self.base, self.base + len(self.hops))
        for _, item in self.network.answers[self.read :]:
            if isinstance(item, FenceAck | Token | FaultReport) and item.handle in names:
                self._receive(item)
        self.read = len(self.network.answers)

    def _receive(self, item: FenceAck | Token | FaultReport) -> None:
        index = item.handle - self.base
        if isinstance(item, FaultReport):
            self.reports.append(item)
        elif item.epoch != self.epoch:
            return
        elif isinstance(item, FenceAck):
            self.fenced[index] = item
            self.own[index] = item.server_handle
        else:
            self.tokens.append(item)
            if item.token >= 0:
                assert item.position == len(self.log), "a token out of order"
                self.log += item.group

    def starts(self) -> list[int]:
        """Return the position at which each hop restarts, by the restart pass (R6, replay)."""
        answers = [self.fenced[index] for index in range(len(self.hops))]
        states = [
            HopState(answer.kv, last, answer.retained)
            for answer, (_, _, last) in zip(answers, self.hops, strict=True)
        ]
        return [point.start for point in restart_points(states)]

    def go(
        self, *, credit: int = FOREVER, sample: bool = True, body_lane: Lane = Lane.BULK
    ) -> list[StartEpoch]:
        starts = self.starts()
        self.last_started = self.epoch
        gos = [self._go_of(index, starts, credit, sample) for index in range(len(self.hops))]
        for index, go in enumerate(gos):
            self.put(index, go)
        for index in {0, len(self.hops) - 1}:
            have = starts[0] if index == 0 else self.fenced[index].log
            have = min(have, self.fenced[index].log)
            body = Input(self.own[index], self.epoch, have, tuple(self.log[have:]))
            self.put(index, body, body_lane)
        return gos

    def _go_of(self, index: int, starts: list[int], credit: int, sample: bool) -> StartEpoch:
        last = len(self.hops) - 1
        return StartEpoch(
            handle=self.own[index],
            epoch=self.epoch,
            length=len(self.log),
            start=starts[index],
            send_from=starts[index + 1] if index < last else len(self.log),
            predecessor=self.neighbour(index - 1) if index else None,
            successor=self.neighbour(index + 1) if index < last else None,
            ring=self.neighbour(0) if index == last and last else None,
            credit=credit,
            hops=len(self.hops),
            sample=sample,
        )

    def neighbour(self, index: int) -> Neighbour:
        return Neighbour(self.hops[index][0].address, self.own[index])

    def start(self, new: int, *, credit: int = FOREVER, sample: bool = True) -> None:
        """Fence, which opens new hops, wait for the answers, and send StartEpoch."""
        self.refence(new)
        assert all(answer.refusal is None for answer in self.fenced.values())
        self.go(credit=credit, sample=sample)

    def finish(self) -> list[Token]:
        """Run until the network is idle; return all tokens of this epoch."""
        self.network.run()
        self.listen()
        return self.tokens

    def resume(self, *, credit: int = FOREVER) -> list[Token]:
        """Send StartEpoch, and run until the network is idle; return all tokens of this epoch."""
        self.go(credit=credit)
        return self.finish()

    def raise_credit(self, limit: int) -> None:
        tail = len(self.hops) - 1
        self.put(tail, Window(self.own[tail], self.epoch, 0, limit))

    def replace_hop(self, index: int, server: Server) -> None:
        _, first, last = self.hops[index]
        self.hops[index] = (server, first, last)
        self.own[index] = NO_HANDLE

    def close(self) -> None:
        for index, handle in enumerate(self.own):
            self.put(index, Close(handle))

    def expected(self, prompt: Sequence[int], new: int) -> list[int]:
        return expected(prompt, new, self.network.options["n_blocks"], self.sampling)


def start_all(clients: Sequence[Client], new: int, *, credit: int = FOREVER) -> None:
    """Start all clients like `Client.start`, so that they run at the same time."""
    for client in clients:
        client.fence(new)
    clients[0].network.run()
    for client in clients:
        client.listen()
        client.go(credit=credit)


def route(
    network: ServerNetwork, hops: int, **options: Unpack[Options]
) -> list[tuple[Server, int, int]]:
    """Return `hops` new servers that share the blocks evenly."""
    size = network.options["n_blocks"] // hops
    spans = [(size * at, size * (at + 1)) for at in range(hops)]
    return [(network.serve(first, last, **options), first, last) for first, last in spans]


def make_clients(
    network: ServerNetwork, servers: list[tuple[Server, int, int]], lengths: Sequence[int]
) -> list[Client]:
    """Return sessions over the same servers, with prompts of these lengths."""
    return [
        Client(network, servers[:], prompt(length, at), session=f"s{at}", base=1000 * (at + 1))
        for at, length in enumerate(lengths)
    ]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}.{at}").randrange(VOCABULARY) for at in range(length)]


def opened(
    network: ServerNetwork,
    hops: int = 2,
    length: int = 12,
    new: int = 8,
    **options: Unpack[Options],
) -> Client:
    client = Client(network, route(network, hops, **options), prompt(length))
    client.refence(new)
    return client


def again(network: ServerNetwork, client: Client, kind: type[Item]) -> None:
    """Send every item of a kind from the gateway that is in transit once more."""
    for (sender, to, _), items in list(network.lanes.items()):
        for item in list(items):
            if isinstance(item, kind) and sender == client.gateway:
                network.put(sender, to, item)
