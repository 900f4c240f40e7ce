"""Drives server cores on the hash model by hand, with a gateway that does only what a test tells it.

`Pump` holds servers and the lanes between them: FIFO per lane, and, with a seed, any interleaving of lanes and steps.
`Client` is one session of a scripted gateway: it fences, says Go by the pass R6 and collects what the servers say.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from modelswarm.protocol.heartbeat import BUSY_SECONDS
from modelswarm.protocol.identity import NO_HANDLE, Address, Epoch, PeerId
from modelswarm.protocol.messages import (
    Close,
    Create,
    FaultReport,
    Fence,
    FenceAck,
    Input,
    Item,
    Lane,
    Neighbour,
    Role,
    Rows,
    Sampling,
    Send,
    StartEpoch,
    Token,
    Turn,
    Window,
)
from modelswarm_gateway.core.sessions.replay_plan import HopState, restart_points
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import BatchItem, ModelShape, Result, Task
from modelswarm_serving.model.hash_model import HashModel, reference_tokens

GATEWAY = "gateway/1/a"
VOCABULARY = 97
FOREVER = 1 << 40


@dataclass
class Server:
    address: Address
    core: ServerCore
    model: HashModel
    out: tuple[Task, ...] = ()  # the step that is out

    @property
    def works(self) -> tuple[BatchItem, ...]:
        """Of the step that is out, without copies."""
        return tuple(task for task in self.out if isinstance(task, BatchItem))

    def plan(self, now: float) -> bool:
        if not self.out:
            self.out = self.core.plan_step(now)
        return bool(self.out)

    def retire(self, now: float, results: list[Result] | None = None) -> None:
        work, self.out = self.out, ()
        self.core.finish_step(self.model.step(work) if results is None else results, now)


@dataclass
class Pump:
    """All servers of a test, the lanes between them, and what reached the gateways."""

    n_blocks: int = 6
    seed: int | None = None
    now: float = 0.0
    servers: dict[PeerId, Server] = field(default_factory=dict)
    lanes: dict[tuple[PeerId, PeerId, Lane], deque[Item]] = field(default_factory=dict)
    answers: list[tuple[PeerId, Item]] = field(default_factory=list)  # (server, what it said)
    seen: list[tuple[PeerId, Send]] = field(default_factory=list)  # everything servers sent
    dead: set[PeerId] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def serve(
        self,
        first: int,
        last: int,
        *,
        pages: int = 64,
        page_size: int = 4,
        row_bytes: int = 8,
        max_length: int = 4096,
        lease_seconds: float = 30.0,
        token_budget: int = 512,
        row_window: int = 1024,
        coming_bytes: int = 32 << 20,
        replay_bytes: int = 1 << 20,
        copy_rate: int = 0,
    ) -> Server:
        name = f"s{len(self.servers)}/1/b"
        shape = ModelShape(
            first=first,
            last=last,
            n_blocks=self.n_blocks,
            row_bytes=row_bytes,
            page_size=page_size,
            total_pages=pages,
            max_length=max_length,
            vocab_size=VOCABULARY,
        )
        address = Address(name, f"{name}:1")
        settings = ServerSettings(
            address,
            lease_seconds=lease_seconds,
            token_budget=token_budget,
            row_window=row_window,
            in_flight_bytes=coming_bytes,
            replay_bytes=replay_bytes,
            transfer_rate=copy_rate,
        )
        draws = random.Random(name)
        core = ServerCore(settings, shape, lambda: draws.getrandbits(64))
        server = Server(address, core, HashModel(shape))
        core.on_peer_connected(GATEWAY, Role.GATEWAY, self.now)
        for other in self.servers.values():
            core.on_peer_connected(other.address.peer, Role.SERVER, self.now)
            other.core.on_peer_connected(name, Role.SERVER, self.now)
        self.servers[name] = server
        return server

    def put(self, sender: PeerId, to: PeerId, item: Item, lane: Lane = Lane.LIVE) -> None:
        self.lanes.setdefault((sender, to, lane), deque()).append(item)

    def collect(self) -> None:
        for name, server in self.servers.items():
            for send in server.core.take_sends():
                self.seen.append((name, send))
                if send.to.peer in self.servers:
                    self.put(name, send.to.peer, send.item, send.lane)
                else:
                    self.answers.append((name, send.item))

    def deliver(self, key: tuple[PeerId, PeerId, Lane]) -> None:
        sender, to, _ = key
        item = self.lanes[key].popleft()
        if to not in self.dead:
            self.servers[to].core.receive(sender, item, self.now)
            self.collect()

    def run(self, events: int = 1_000_000) -> None:
        """Deliver and step until nothing moves, at most `events` times."""
        for _ in range(events):
            self.collect()
            moves = self._moves()
            if not moves:
                return
            chosen = moves[0] if self.seed is None else self.random.choice(moves)
            if isinstance(chosen, Server):
                if chosen.out:
                    chosen.retire(self.now)
                else:
                    chosen.plan(self.now)
                self.collect()
            else:
                self.deliver(chosen)

    def _moves(self) -> list[tuple[PeerId, PeerId, Lane] | Server]:
        moves: list[tuple[PeerId, PeerId, Lane] | Server] = [
            key for key, items in self.lanes.items() if items
        ]
        for name, server in self.servers.items():
            if name not in self.dead and (server.out or server.core.stats.ready):
                moves.append(server)
        return moves

    def cut_link(self, one: PeerId, other: PeerId) -> None:
        """What is on the way is lost, and both ends hear it."""
        for lane in Lane:
            for key in ((one, other, lane), (other, one, lane)):
                self.lanes.pop(key, None)
        for peer, gone in ((one, other), (other, one)):
            if peer in self.servers:
                self.servers[peer].core.on_peer_lost(gone, self.now)
        self.collect()

    def tick(self, seconds: float) -> None:
        """As often as a process does that does not stand still."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 2 * BUSY_SECONDS)
            for server in self.servers.values():
                server.core.tick(self.now)
            self.collect()

    @property
    def free_pages(self) -> list[int]:
        return [server.core.stats.free_pages for server in self.servers.values()]

    def sent(self, kind: type[Item], sender: PeerId | None = None) -> list[Send]:
        return [
            send
            for name, send in self.seen
            if isinstance(send.item, kind) and sender in (None, name)
        ]


@dataclass
class Client:
    """One session of the scripted gateway. `hops` are (server, first, last) in route order."""

    pump: Pump
    hops: list[tuple[Server, int, int]]
    log: list[int]
    session: str = "a"
    sampling: Sampling = field(default_factory=Sampling)
    gateway: PeerId = GATEWAY
    epoch: Epoch = field(default_factory=lambda: Epoch(0, 1))
    base: int = 100  # its names for the hops: base, base + 1, ...
    own: list[int] = field(default_factory=list)
    read: int = 0  # answers looked at
    fenced: dict[int, FenceAck] = field(default_factory=dict)
    reports: list[FaultReport] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)  # of the present epoch
    end: int = 0

    def __post_init__(self) -> None:
        self.own = [NO_HANDLE] * len(self.hops)

    def put(self, hop: int, item: Item, lane: Lane = Lane.LIVE) -> None:
        self.pump.put(self.gateway, self.hops[hop][0].address.peer, item, lane)

    def turn(self, new: int) -> Turn:
        self.end = len(self.log) + new
        return Turn(reserved_positions=max(self.end - 1, 0), end=self.end, sampling=self.sampling)

    def fence(
        self,
        new: int | None = None,
        kv_cut: int | None = None,
        log_cut: int | None = None,
        *,
        repair: bool = False,
    ) -> None:
        """A fence of every hop with the next epoch, as cut (a) or new turn (`new` tokens) or both."""
        self.epoch = Epoch(self.epoch.counter + 1, self.epoch.gateway)
        self.fenced.clear()
        self.tokens.clear()
        turn = None if new is None else self.turn(new)
        length = len(self.log)
        for index, (_, first, last) in enumerate(self.hops):
            create = None
            if self.own[index] == NO_HANDLE:
                create = Create(self.session, first, last, repair)
                again = Turn(self.end - 1, self.end, self.sampling)
            fence = Fence(
                handle=self.own[index],
                gateway_handle=self.base + index,
                epoch=self.epoch,
                kv_cut=length - 1 if kv_cut is None else kv_cut,
                log_cut=length if log_cut is None else log_cut,
                create=create,
                turn=again if create is not None else turn,
            )
            self.put(index, fence)

    def listen(self) -> None:
        """Sort what has come for this session."""
        names = range(self.base, self.base + len(self.hops))
        for _, item in self.pump.answers[self.read :]:
            if isinstance(item, FenceAck | Token | FaultReport) and item.handle in names:
                self._hear(item)
        self.read = len(self.pump.answers)

    def _hear(self, item: FenceAck | Token | FaultReport) -> None:
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
                self.log.append(item.token)

    def starts(self) -> list[int]:
        """By the pass R6."""
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
        """Fence (opening what is not open), wait for the answers, say Go."""
        self.fence(new)
        self.pump.run()
        self.listen()
        assert all(answer.refusal is None for answer in self.fenced.values())
        self.go(credit=credit, sample=sample)

    def finish(self) -> list[Token]:
        """Run until nothing moves; all tokens of this epoch."""
        self.pump.run()
        self.listen()
        return self.tokens

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
        return reference_tokens(
            prompt,
            self.sampling,
            new,
            len(prompt) + new,
            n_blocks=self.pump.n_blocks,
            vocabulary=VOCABULARY,
        )


def start_all(clients: Sequence[Client], new: int) -> None:
    """Like `Client.start`, so that all of them run at the same time."""
    for client in clients:
        client.fence(new)
    clients[0].pump.run()
    for client in clients:
        client.listen()
        client.go()


def route(pump: Pump, hops: int, **settings: int) -> list[tuple[Server, int, int]]:
    """`hops` new servers that share the blocks evenly."""
    size = pump.n_blocks // hops
    spans = [(size * at, size * (at + 1)) for at in range(hops)]
    return [(pump.serve(first, last, **settings), first, last) for first, last in spans]


def prompt(length: int, seed: int = 0) -> list[int]:
    return [random.Random(f"{seed}.{at}").randrange(VOCABULARY) for at in range(length)]


def repeated(item: Rows, **changes: object) -> Rows:
    return replace(item, **changes)  # type: ignore[arg-type]


def opened(pump: Pump, hops: int = 2, length: int = 12, new: int = 8, **settings: int) -> Client:
    client = Client(pump, route(pump, hops, **settings), prompt(length))
    client.fence(new)
    pump.run()
    client.listen()
    return client


def again(pump: Pump, client: Client, kind: type[Item]) -> None:
    """Every message of a kind that the gateway has put on a lane, once more behind all others."""
    for (sender, to, _), items in list(pump.lanes.items()):
        for item in list(items):
            if isinstance(item, kind) and sender == client.gateway:
                pump.put(sender, to, item)
