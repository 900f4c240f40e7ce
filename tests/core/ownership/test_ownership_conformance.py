"""Random traces of the real cores, compared with the ownership model at every event of a server (R20, ownership)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from support.core.gateway import LEASE, Gateway, add_gateway
from support.core.network import Network
from support.core.server import MODEL, Options
from support.ownership_model.conformance import MirroredServer, serve_mirrored
from support.ownership_model.state import Rules

from modelswarm.protocol.identity import NO_EPOCH, NO_HANDLE, Epoch, Handle, PeerId
from modelswarm.protocol.messages import (
    Close,
    Create,
    Fence,
    FindSession,
    Heartbeat,
    Hello,
    Input,
    Item,
    Lane,
    LogRequest,
    OwnedSession,
    OwnedSessions,
    Role,
    StartEpoch,
    Turn,
    Window,
)
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation

SESSION = "named"
LENGTH = 40  # entries: no log is longer
TURN = Turn(reserved_positions=LENGTH, end=LENGTH)
OUTCOMES = {
    *("fence: granted", "fence: owner", "fence: taken over", "fence: replaced"),
    *("fence: stale_epoch", "fence: unknown", "close: freed", "close: relinquished"),
    *("start", "input", "owned", "find", "connect", "disconnect", "step or deadline"),
}


@dataclass
class Chaos:
    """One server and gateways that send it anything: right and wrong epochs, handles, ranks and cuts."""

    seed: int
    network: Network = field(init=False)
    server: MirroredServer = field(init=False)
    peers: list[PeerId] = field(init=False)
    handles: list[Handle] = field(default_factory=lambda: [1])  # that the server has given out

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.network = Network(None, Options(lease_seconds=LEASE))
        self.server = serve_mirrored(self.network, SESSION, "s", 0, 4)
        self.peers = [f"g{number}/{number}/a" for number in (1, 2, 3)]
        for peer in self.peers:
            self.connect(peer)

    def connect(self, peer: PeerId) -> None:
        hello = Hello((1, 0), peer, Role.GATEWAY, "", Lane.LIVE, target=f"{peer}:80")
        self.server.connect(hello, self.network.now)

    def make_event(self) -> None:
        """Let one random thing happen."""
        draw, peer = self.random.random(), self.random.choice(self.peers)
        is_linked = self.server.core._peers.is_linked(peer)
        if draw < 0.08:
            self.pass_time(self.random.choice((0.1, 1.0, LEASE / 2, LEASE)))
        elif not is_linked:
            self.connect(peer)
        elif draw < 0.12:
            self.server.disconnect(peer, self.network.now)
        elif draw < 0.2:
            self.server.step(self.network.now)
        else:
            self.server.receive(peer, self.draw_item(peer), self.network.now)
        self.server.take_sends()
        self.handles += self.server.core.handles()
        del self.handles[:-4]

    def pass_time(self, seconds: float) -> None:
        """Some gateways send heartbeats meanwhile; the others are silent."""
        heard = [peer for peer in self.peers if self.random.random() < 0.5]
        end = self.network.now + seconds
        while self.network.now < end:
            self.network.now += 0.25
            self.server.tick(self.network.now)
            for peer in heard:
                if self.server.core._peers.is_linked(peer):
                    self.server.receive(peer, Heartbeat(), self.network.now)

    def draw_item(self, peer: PeerId) -> Item:
        known = next(iter(self.server.core._fencing.hops), None)
        mine = known is not None and known.gateway == peer
        handle = known.handle if known is not None and self.random.random() < 0.8 else None
        handle = handle or self.random.choice(self.handles)
        epoch = known.epoch if known is not None and self.random.random() < 0.8 else NO_EPOCH
        entries = tuple(self.random.randrange(97) for _ in range(self.random.randrange(1, 6)))
        have = len(known.log) if known is not None else 0
        if have + len(entries) > LENGTH - 4:
            return self.draw_fence(peer, handle)
        kinds: list[Item] = [
            self.draw_start(handle, epoch, have),
            Input(handle, epoch, max(0, have - self.random.randrange(3)), entries),
            Close(handle, self.random.random() < 0.6),
            FindSession(SESSION, self.random.random() < 0.5),
            LogRequest(SESSION),
            OwnedSessions((OwnedSession(SESSION, handle, epoch),) if mine else ()),
            Window(handle, epoch, 0, have + 1),
        ]
        weights = [6, 5, 1.5, 1, 0.3, 1, 1]
        if self.random.random() < 0.5:
            return self.draw_fence(peer, handle)
        return self.random.choices(kinds, weights)[0]

    def draw_start(self, handle: Handle, epoch: Epoch, have: int) -> StartEpoch:
        length = max(1, have + self.random.randrange(-1, 3))
        return StartEpoch(handle, epoch, length, 0, length, None, None, None, credit=length)

    def draw_fence(self, peer: PeerId, handle: Handle) -> Fence:
        """Draw a Fence of an epoch and of a rank close to those of the hop."""
        known = next(iter(self.server.core._fencing.hops), None)
        near = known.epoch.counter if known is not None else 0
        counter = max(1, near + self.random.randrange(-1, 3))
        number = 1 + self.peers.index(peer)
        ran = [None, Epoch(counter, self.random.randrange(1, 4))]
        ran += [] if known is None else [known.newest_run_epoch, known.epoch]
        last_started = self.random.choice(ran)
        is_create = self.random.random() < 0.6
        cut = self.random.randrange(LENGTH)
        return Fence(
            handle=NO_HANDLE if is_create else handle,
            gateway_handle=number,
            epoch=Epoch(counter, number),
            kv_cut=cut,
            log_cut=cut,
            create=Create(SESSION, 0, 4) if is_create else None,
            turn=TURN if is_create else None,
            last_started=None if last_started == NO_EPOCH else last_started,
        )


def test_server_decides_as_the_model_says() -> None:
    """Each event is compared: owner, epochs, phase, log and flags of the hop after it, and the answers."""
    seen: Counter[str] = Counter()
    compared = 0
    for seed in range(40):
        chaos = Chaos(seed)
        for _ in range(150):
            chaos.make_event()
        compared += chaos.server.compared
        seen += chaos.server.seen
    assert set(seen) >= OUTCOMES, f"never compared: {OUTCOMES - set(seen)}"
    assert compared >= 5000


@pytest.mark.parametrize(
    "rules",
    [
        pytest.param(Rules(rank_by_run=False), id="rank"),
        pytest.param(Rules(renews_handles=False), id="handles"),
        pytest.param(Rules(drops_unrun=False), id="unrun-entries"),
        pytest.param(Rules(lease_protects=False), id="lease"),
    ],
)
def test_model_without_a_rule_differs_from_the_server(rules: Rules) -> None:
    with pytest.raises(AssertionError):
        for seed in range(40):
            chaos = Chaos(seed)
            chaos.server.rules = rules
            for _ in range(150):
                chaos.make_event()


@dataclass
class Contention:
    """Two real gateways and mirrored servers, with turns, takeovers, cuts, stalls and ends at random times."""

    seed: int
    pipeline: bool

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.network = Network(self.seed, Options(lease_seconds=2.0))
        spans = ((0, 2), (2, 4)) if self.pipeline else ((0, 4), (0, 4))
        self.servers = [
            serve_mirrored(self.network, SESSION, f"s{at}", *span) for at, span in enumerate(spans)
        ]
        self.gateways = [add_gateway(self.network, number) for number in (1, 2)]
        self.prompt = tuple(self.random.randrange(97) for _ in range(6))

    def make_event(self) -> None:
        draw, gateway = self.random.random(), self.random.choice(self.gateways)
        server = self.random.choice(self.servers)
        if draw < 0.3:
            self.network.wait(self.random.choice((0.1, 0.5, 2.2)))
        elif draw < 0.4 and (gateway.peer, server.peer) in self.network.links:
            self.network.cut_link(gateway.peer, server.peer)
        elif draw < 0.55:
            self.relink()
        elif draw < 0.6:
            gateway.frozen = not gateway.frozen
        elif draw < 0.7:
            self.network.run(self.random.randrange(12))
        elif not gateway.frozen:
            self.use(gateway)

    def relink(self) -> None:
        for gateway in self.gateways:
            for server in self.servers:
                if (gateway.peer, server.peer) not in self.network.links and not gateway.frozen:
                    self.network.link(gateway.peer, server.peer)

    def use(self, gateway: Gateway) -> None:
        """A client asks this gateway: it begins a turn, leaves it, or lets it find the session."""
        core, now = gateway.core, self.network.now
        view = core.find_view(SESSION)
        if view is None:
            self.search(gateway)
        elif view.state == "parked":
            gateway.begin(SESSION, self.draw_prompt(), 4, ahead=self.random.choice((2, 40)))
        elif self.random.random() < 0.5:
            core.cancel_turn(SESSION, now)
        else:
            core.on_read(SESSION, LENGTH, now)
        self.network.run(self.random.randrange(40))

    def search(self, gateway: Gateway) -> None:
        core = gateway.core
        core.find_session(SESSION, MODEL, self.network.now, claims=True)
        self.network.wait(0.4)
        found = gateway.all(SessionLocation)
        if not found or found[-1].is_owner_alive or found[-1].claimant:
            return
        where = found[-1]
        if where.log_holders and not where.takeover_wait:
            core.fetch_log(SESSION, where.log_holders[0], self.network.now)
            self.network.wait(0.2)
            logs = gateway.all(FetchedLog)
            if logs and logs[-1].tokens and core.find_view(SESSION) is None:
                core.take_over(where, MODEL, logs[-1], self.network.now)
        elif not (where.log_holders or where.takeover_wait) and core.find_view(SESSION) is None:
            core.open_session(SESSION, MODEL, self.network.now, above=where.epoch.counter)
            gateway.opened.add(SESSION)

    def draw_prompt(self) -> tuple[int, ...]:
        kept = self.random.randrange(1, len(self.prompt) + 1)
        return (*self.prompt[:kept], *(self.random.randrange(97) for _ in range(3)))


@pytest.mark.parametrize("pipeline", [False, True], ids=["replicas", "pipeline"])
def test_servers_of_real_gateways_follow_the_model(pipeline: bool) -> None:
    seen: Counter[str] = Counter()
    compared = 0
    for seed in range(25):
        contention = Contention(seed, pipeline)
        for _ in range(40):
            contention.make_event()
        for server in contention.servers:
            compared += server.compared
            seen += server.seen
    fences = {kind for kind in OUTCOMES if kind.startswith("fence")} - {"fence: replaced"}
    assert set(seen) >= fences, f"never compared: {fences - set(seen)}"
    assert compared >= 5000
