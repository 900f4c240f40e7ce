"""Servers that refuse a turn because their pages are taken, and the idle sessions that are evicted for it."""

from __future__ import annotations

from dataclasses import dataclass, field

from support.core.gateway import Gateway, Swarm, add_gateway
from support.core.named_sessions import GatewaySessions
from support.core.network import Network
from support.core.server import MODEL, Options, Server

from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_gateway.generation.named_sessions import Evictions

PROMPT = [5, 6, 7]
ROOM = 18 * 4  # positions that new sessions can reserve on one server
NEEDED = ROOM - 8


@dataclass
class Crowd:
    """Two servers of all blocks: an idle session on the first, and a long turn that fills the second."""

    network: Network = field(
        default_factory=lambda: Network(options=Options(total_pages=20, page_size=4))
    )
    gateway: Gateway = field(init=False)
    first: Server = field(init=False)
    full: Server = field(init=False)

    def __post_init__(self) -> None:
        self.first = self.network.serve(0, 4)
        self.gateway = add_gateway(self.network, 1)
        self.gateway.start("idle", PROMPT, 20)
        self.full = self.network.serve(0, 4)
        self.network.wait(0.5)
        self.gateway.start("long", PROMPT, ROOM - 3, ahead=1, above=0)
        assert self.gateway.route("long") == [self.full.peer]

    def refuse(self, *paused: Server) -> frozenset[str]:
        """Begin a turn that is refused, and return the servers whose pages are taken."""
        for server in paused:
            server.core.pause_admissions(self.network.now)
        self.gateway.start("new", PROMPT, NEEDED - 2)
        assert self.gateway.troubles("new")
        return self.gateway.view("new").crowded_servers

    def evict_one(self) -> bool:
        sessions = GatewaySessions(self.gateway)
        sessions.named_sessions.add_idle((MODEL, "name"), "idle")
        return Evictions(sessions, sessions.named_sessions).evict_for("new", None)  # type: ignore[arg-type]


def test_idle_session_on_a_crowded_server_is_evicted() -> None:
    crowd = Crowd()
    assert crowd.refuse() == {crowd.first.peer, crowd.full.peer}
    assert crowd.evict_one()
    crowd.gateway.clear_and_start("new", PROMPT, NEEDED - 2)
    assert crowd.gateway.route("new") == [crowd.first.peer]
    assert not crowd.gateway.troubles("new") and not crowd.gateway.view("new").crowded_servers


def test_idle_session_on_a_paused_server_is_kept() -> None:
    crowd = Crowd()
    assert crowd.refuse(crowd.first) == {crowd.full.peer}
    assert not crowd.evict_one(), "its end would free nothing where pages are short"


def test_pause_is_named_in_the_refusal() -> None:
    crowd = Crowd()
    assert not crowd.refuse(crowd.first, crowd.full)
    [refused] = crowd.gateway.troubles("new")
    assert "a device of the servers of m was full" in refused.detail


def test_full_server_counts_more_than_one_that_is_too_short() -> None:
    """The turn may be tried again, and an idle session may make room for it."""
    swarm = Swarm()
    long = swarm.serve(0, 4, total_pages=20, page_size=4)
    swarm.serve(0, 4, total_pages=6, page_size=4)
    swarm.gateway.start("fill", PROMPT, NEEDED, ahead=1)
    assert swarm.gateway.route("fill") == [long.peer]
    swarm.gateway.start("new", PROMPT, 40)
    [refused] = swarm.gateway.all(Refused)
    assert refused.reason is RefusalReason.NO_ROOM
    assert swarm.gateway.view("new").crowded_servers == {long.peer}
