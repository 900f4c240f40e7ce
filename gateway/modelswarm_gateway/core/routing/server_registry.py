"""The servers this gateway is linked to: what they hold, how they do, and who is to be left or kept apart.

Used by the loop to cover blocks with servers of one kind (`kinds.py`), at prices that `pricing.py` keeps. Knows nothing
of sessions beyond how many hops each server carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Beat, Hello
from modelswarm_gateway.core.interface.effects import Effect, Ejected, Unlink
from modelswarm_gateway.core.routing.cost_model import Needs, Price, Pricing
from modelswarm_gateway.core.routing.path_search import Leg
from modelswarm_gateway.core.servers.block_index import Roster
from modelswarm_gateway.core.servers.drain_causes import STOPPING, Leaving
from modelswarm_gateway.core.servers.health import EJECTION, SLOW_EJECTION, Health, Standing
from modelswarm_gateway.core.servers.link_failures import Pairs
from modelswarm_gateway.core.servers.server import Server, plausible
from modelswarm_gateway.core.servers.step_times import Pace
from modelswarm_gateway.core.servers.variant import Kind, kind_of, makes_sense

SLOW = "slow"  # cause of an ejection that lasts longer, while sessions are moved away


class Fleet:
    def __init__(
        self, pair_seconds: float, draw: Callable[[], int], emit: Callable[[Effect], None]
    ) -> None:
        self._emit = emit
        self._draw = draw
        self._servers: dict[PeerId, Server] = {}
        self._rosters: dict[str, dict[Kind, Roster]] = {}  # of the same, by model
        self._leading: dict[str, Kind] = {}  # model -> the kind that new sessions get
        self._unsettled: set[str] = set()  # models whose servers have changed since that was seen
        self._pairs = Pairs(pair_seconds)
        self._health = Health()
        self._leaving = Leaving()
        self._pricing = Pricing(self.standing, pair_seconds)
        self.hops: Counter[PeerId] = Counter()  # this gateway's own hops, by server
        self._resting: Mapping[PeerId, int] = {}  # of those, from which no token is expected now
        self.suspected: frozenset[PeerId] = frozenset()  # silent; kept by `detection.py`

    def join(self, hello: Hello, now: float = 0.0) -> bool:
        """False: it cannot be planned with, and is as if it were not there."""
        if not makes_sense(hello):
            return False
        self._remove(hello.peer)
        server = Server(hello, draining=hello.peer in self.left)
        self._servers[hello.peer] = server
        kind = kind_of(hello)
        rosters = self._rosters.setdefault(hello.model, {})
        rosters.setdefault(kind, Roster(kind.n_blocks)).add(server)
        self._pricing.joined((hello.model, kind), server)
        self._health.join(hello.peer, now)
        self._unsettled.add(hello.model)
        return True

    def leave(self, peer: PeerId) -> None:
        as_said = self.is_left(peer, STOPPING)
        self.use_again(peer, STOPPING)  # whoever comes back on a new link says so again
        if self._remove(peer):
            self._health.leave(peer, as_said=as_said)

    def _remove(self, peer: PeerId) -> bool:
        server = self._servers.pop(peer, None)
        if server is None:
            return False
        model, kind = server.hello.model, kind_of(server.hello)
        rosters = self._rosters[model]
        rosters[kind].remove(peer)
        if not rosters[kind].servers:
            del rosters[kind]
        if not rosters:
            del self._rosters[model]
        self._pricing.left((model, kind), peer)
        self._unsettled.add(model)
        return True

    def _lead(self, model: str) -> None:
        """The kind that holds all blocks, of several the one with most servers, of equals the one that leads."""
        rosters = self._rosters.get(model)
        if not rosters:
            self._leading.pop(model, None)
            return
        before = self._leading.get(model)
        self._leading[model] = max(
            rosters,
            key=lambda kind: (
                rosters[kind].holds_all,
                len(rosters[kind].servers),
                kind == before,
            ),
        )

    def leading(self, model: str) -> Kind | None:
        """The kind of servers that a turn is to run on; None if no server of the model is linked."""
        if model in self._unsettled:
            self._unsettled.discard(model)
            self._lead(model)
        return self._leading.get(model)

    def failed(self, peer: PeerId, now: float) -> None:
        """A step failed there: its sessions may do better elsewhere."""
        if server := self._servers.get(peer):
            server.failed_at = now
            self.blame(peer, "failed", now)

    def linked(self, peer: PeerId) -> bool:
        return peer in self._servers

    def get(self, peer: PeerId) -> Server | None:
        return self._servers.get(peer)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def of_kind(self, model: str, kind: Kind | None) -> list[Server]:
        roster = self._rosters.get(model, {}).get(kind) if kind is not None else None
        return [] if roster is None else list(roster.servers.values())

    def equals(self, server: Server) -> Collection[Server]:
        """Linked servers that hold the same blocks as one of them, itself among them."""
        return self._roster_of(server).equals(server)

    def _roster_of(self, server: Server) -> Roster:
        return self._rosters[server.hello.model][kind_of(server.hello)]

    def beat(self, peer: PeerId, beat: Beat, now: float) -> None:
        if server := self._servers.get(peer):
            beat = plausible(beat)
            server.heard(beat, now)
            server.others = max(0, beat.sessions - self.hops[peer])
            self._pricing.mark(peer)
            self._health.beat(peer, beat, now)
            if beat.draining:
                self.leave_alone(peer, STOPPING)

    def leave_alone(self, peer: PeerId, why: str) -> None:
        """Nothing new goes there. It is remembered while the server's link is down: it may come back."""
        self._leaving.add(peer, why)
        if server := self._servers.get(peer):
            server.draining = True
            self._pricing.mark(peer)

    def use_again(self, peer: PeerId, why: str) -> None:
        """Takes a `leave_alone` of that cause back."""
        if self._leaving.take_back(peer, why) and (server := self._servers.get(peer)):
            server.draining = False
            self._pricing.mark(peer)

    def is_left(self, peer: PeerId, why: str) -> bool:
        return self._leaving.is_for(peer, why)

    @property
    def left(self) -> Collection[PeerId]:
        """Servers that sessions are moved away from."""
        return self._leaving.peers

    def why_left(self, peer: PeerId) -> str:
        """The first cause of it; "": it is not left."""
        return self._leaving.why(peer)

    def only_there(self, peer: PeerId) -> list[int]:
        """Blocks of a server that no other holds which is linked, of its kind and not to be left itself."""
        server = self._servers[peer]
        return self._roster_of(server).only_of(server, lambda other: not other.draining)

    # ---- what it costs

    def placed(self, peer: PeerId, positions: int, rows: int) -> None:
        """A hop of ours is made there: KV for `positions`, and `rows` to run until it is at rest."""
        self.hops[peer] += 1
        if server := self._servers.get(peer):
            server.place(positions, rows)
            self._pricing.mark(peer)

    def freed(self, peer: PeerId) -> None:
        """A hop of ours there is given up."""
        self.hops[peer] -= 1
        if not self.hops[peer]:
            del self.hops[peer]  # or every server that ever was would be remembered
        if server := self._servers.get(peer):
            server.placed -= 1
            self._pricing.mark(peer)

    def round_trip(self, peer: PeerId, seconds: float) -> None:
        """A question to a server was answered after so long."""
        if server := self._servers.get(peer):
            server.answered(seconds)
            self._pricing.zones.heard(server.hello.zone, 1000 * seconds)
            self._pricing.mark(peer)

    # ---- health

    def standing(self, peer: PeerId, now: float) -> Standing:
        """How well a server does; a server that nothing is known about does well."""
        working = self.hops[peer] - self._resting.get(peer, 0)
        standing = self._health.standing(peer, now, working)
        return replace(standing, ejected=True) if peer in self.suspected else standing

    def blame(self, peer: PeerId, cause: str, now: float) -> None:
        """It was at fault: left out of new routes for a while, and then tried with one session."""
        server = self._servers.get(peer)
        if server is None:
            return
        self._pricing.mark(peer)
        if self._health.strike(peer, now, SLOW_EJECTION if cause == SLOW else EJECTION):
            self._emit(Ejected(peer, server.hello.model, cause))

    def give_up(self, peer: PeerId, reason: str) -> None:
        """Its link is closed; if it is there, it will be found again."""
        self._emit(Unlink(peer, reason))

    def suspect(self, silent: frozenset[PeerId]) -> None:
        """These, and no others, have fallen silent."""
        for peer in silent ^ self.suspected:
            self._pricing.mark(peer)
        self.suspected = silent

    @property
    def on_trial(self) -> Collection[PeerId]:
        """Servers that are to carry one session, or carry it now, to show that they are well."""
        return self._health.on_trial

    def rests(self, resting: Mapping[PeerId, int]) -> None:
        """So many hops of servers on trial are of sessions that wait for nothing: no canary, they say nothing."""
        for peer in resting.keys() | self._resting.keys():
            if resting.get(peer) != self._resting.get(peer):
                self._pricing.mark(peer)
        self._resting = resting

    def ejection_over(self, peer: PeerId, now: float) -> bool:
        return now >= self._health.ejected_until(peer)

    def compared(self, peer: PeerId, slowness: float) -> None:
        """Its block time, as a multiple of that of its like."""
        if self._health.compared(peer, slowness):
            self._pricing.mark(peer)

    def spare(self, peer: PeerId, now: float, without: Collection[PeerId] = ()) -> bool:
        """Whether all its blocks are held by others that do well, those `without` not counted: an ejection never
        uncovers a block."""

        def does_well(other: Server) -> bool:
            name = other.hello.peer
            ejected = name in without or self.standing(name, now).ejected
            return not ejected and not other.draining

        server = self._servers[peer]
        return not self._roster_of(server).only_of(server, does_well)

    def served(self, peers: Iterable[PeerId], now: float) -> None:
        """A session on these has a new token."""
        for peer in self._health.on_trial.intersection(peers):
            self._health.served(peer, now)
            self._pricing.mark(peer)

    def take_news(self) -> set[PeerId]:
        """Servers whose pace has changed since this was asked last."""
        return self._health.take_news()

    def pace(self, peer: PeerId) -> Pace:
        return self._health.pace(peer)

    def pair_failed(self, reporter: PeerId, peer: PeerId, generation: int, now: float) -> None:
        if not (self.linked(reporter) and self.linked(peer)):
            return  # one of them died: nothing is known against the link between them
        self._pairs.failed(reporter, peer, generation, now)

    def bad_pairs(self, now: float) -> dict[frozenset[PeerId], int]:
        """Pairs to avoid, with how often each failed (`pairs.py`)."""
        return self._pairs.bad(now)

    def cover(
        self,
        model: str,
        kind: Kind,
        blocks: tuple[int, int],
        now: float,
        *,
        between: tuple[PeerId | None, PeerId | None],
        needs: Needs,
        cheapest: bool = False,
    ) -> list[Leg] | None:
        """Servers for `blocks`, between two that stay: drawn among the best, so that gateways do not herd.

        Servers that drain, fail or are ejected only where nobody else holds a block; those on which the session hardly
        fits if there are no others at all.
        """

        def draw() -> float:
            return (self._draw() >> 11) / (1 << 53)

        return self._pricing.cover(
            (model, kind),
            lambda: self.of_kind(model, kind),
            blocks,
            between,
            needs,
            now,
            None if cheapest else draw,
        )

    def cost(
        self, model: str, kind: Kind, route: Sequence[tuple[PeerId, int, int]], now: float
    ) -> float:
        """What a route of (peer, first, last) would cost somebody who takes it now, in ms."""
        return self._pricing.cost((model, kind), lambda: self.of_kind(model, kind), route, now)

    def price(self, server: Server, now: float) -> Price:
        """What a hop on a linked server costs now, and why."""
        usual = self._pricing.usual_ms((server.hello.model, kind_of(server.hello)))
        return self._pricing.price(server, usual, now)

    def max_length(self, model: str) -> int:
        """Most positions of a session that some route can hold; 0: no server of the model is linked."""
        kind = self.leading(model)
        return 0 if kind is None else self._rosters[model][kind].longest

    @property
    def stopping(self) -> frozenset[PeerId]:
        """Servers that have said themselves that they are about to end: they take in nobody."""
        return self._leaving.all_for(STOPPING)

    def uncovered(self, model: str, without: frozenset[PeerId] = frozenset()) -> list[int]:
        """Blocks of the model that no linked server of its leading kind holds but for those `without`."""
        kind = self.leading(model)
        return [] if kind is None else self._rosters[model][kind].missing(without)
