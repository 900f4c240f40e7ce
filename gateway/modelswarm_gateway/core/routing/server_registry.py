"""The servers this gateway is linked to: what they hold, how they do, and who is to be left or kept apart.

Used by the loop to cover blocks with servers of one kind (`kinds.py`), at prices that `pricing.py` keeps. Knows nothing
of sessions beyond how many hops each server carries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat, Hello
from modelswarm_gateway.core.interface.effects import Effect, Ejected, Unlink
from modelswarm_gateway.core.routing.cost_model import Needs, HopCost, CostModel
from modelswarm_gateway.core.routing.path_search import RouteHop
from modelswarm_gateway.core.servers.block_index import BlockIndex
from modelswarm_gateway.core.servers.drain_causes import STOPPING, DrainCauses
from modelswarm_gateway.core.servers.health import BASE_EJECTION_TIME, SLOW_EJECTION_TIME, HealthTable, HealthStatus
from modelswarm_gateway.core.servers.link_failures import LinkFailures
from modelswarm_gateway.core.servers.server import Server, sanitized
from modelswarm_gateway.core.servers.step_times import StepTimes
from modelswarm_gateway.core.servers.variant import ModelVariant, variant_of, is_valid

SLOW_CAUSE = "slow"  # cause of an ejection that lasts longer, while sessions are moved away


class ServerRegistry:
    def __init__(
        self, pair_seconds: float, draw: Callable[[], int], emit: Callable[[Effect], None]
    ) -> None:
        self._emit = emit
        self._draw = draw
        self._servers: dict[PeerId, Server] = {}
        self._indexes: dict[str, dict[ModelVariant, BlockIndex]] = {}  # of the same, by model
        self._active: dict[str, ModelVariant] = {}  # model -> the kind that new sessions get
        self._changed: set[str] = set()  # models whose servers have changed since that was seen
        self.links = LinkFailures(pair_seconds)
        self.health = HealthTable()
        self.drains = DrainCauses()
        self.costs = CostModel(self.health_status, pair_seconds)
        self.hops: Counter[PeerId] = Counter()  # this gateway's own hops, by server
        self._idle_hops: Mapping[PeerId, int] = {}  # of those, from which no token is expected now
        self.suspected: frozenset[PeerId] = frozenset()  # silent; kept by `detection.py`

    def register(self, hello: Hello, now: float = 0.0) -> bool:
        """False: it cannot be planned with, and is as if it were not there."""
        if not is_valid(hello):
            return False
        self._remove(hello.peer)
        server = Server(hello, draining=hello.peer in self.left)
        self._servers[hello.peer] = server
        kind = variant_of(hello)
        rosters = self._indexes.setdefault(hello.model, {})
        rosters.setdefault(kind, BlockIndex(kind.n_blocks)).add(server)
        self.costs.add_server((hello.model, kind), server)
        self.health.add_server(hello.peer, now)
        self._changed.add(hello.model)
        return True

    def deregister(self, peer: PeerId) -> None:
        as_said = self.is_left(peer, STOPPING)
        self.undrain(peer, STOPPING)  # whoever comes back on a new link says so again
        if self._remove(peer):
            self.health.remove_server(peer, announced=as_said)

    def _remove(self, peer: PeerId) -> bool:
        server = self._servers.pop(peer, None)
        if server is None:
            return False
        model, kind = server.hello.model, variant_of(server.hello)
        rosters = self._indexes[model]
        rosters[kind].remove(peer)
        if not rosters[kind].servers:
            del rosters[kind]
        if not rosters:
            del self._indexes[model]
        self.costs.remove_server((model, kind), peer)
        self._changed.add(model)
        return True

    def _choose_active(self, model: str) -> None:
        """The kind that holds all blocks, of several the one with most servers, of equals the one that leads."""
        rosters = self._indexes.get(model)
        if not rosters:
            self._active.pop(model, None)
            return
        current = self._active.get(model)
        self._active[model] = max(
            rosters,
            key=lambda kind: (
                rosters[kind].is_complete,
                len(rosters[kind].servers),
                kind == current,
            ),
        )

    def active_variant(self, model: str) -> ModelVariant | None:
        """The kind of servers that a turn is to run on; None if no server of the model is linked."""
        if model in self._changed:
            self._changed.discard(model)
            self._choose_active(model)
        return self._active.get(model)

    def on_step_failed(self, peer: PeerId, now: float) -> None:
        """A step failed there: its sessions may do better elsewhere."""
        if server := self._servers.get(peer):
            server.failed_at = now
            self.eject(peer, "failed", now)

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self._servers

    def get(self, peer: PeerId) -> Server | None:
        return self._servers.get(peer)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def servers_of(self, model: str, variant: ModelVariant | None) -> list[Server]:
        roster = self._indexes.get(model, {}).get(variant) if variant is not None else None
        return [] if roster is None else list(roster.servers.values())

    def replicas_of(self, server: Server) -> Collection[Server]:
        """Linked servers that hold the same blocks as one of them, itself among them."""
        return self._index_of(server).replicas_of(server)

    def _index_of(self, server: Server) -> BlockIndex:
        return self._indexes[server.hello.model][variant_of(server.hello)]

    def on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat, now: float) -> None:
        if server := self._servers.get(peer):
            heartbeat = sanitized(heartbeat)
            server.on_heartbeat(heartbeat, now)
            server.other_sessions = max(0, heartbeat.sessions - self.hops[peer])
            self.costs.mark_changed(peer)
            self.health.record_heartbeat(peer, heartbeat, now)
            if heartbeat.draining:
                self.drain(peer, STOPPING)

    def drain(self, peer: PeerId, cause: str) -> None:
        """Nothing new goes there. It is remembered while the server's link is down: it may come back."""
        self.drains.add_cause(peer, cause)
        if server := self._servers.get(peer):
            server.draining = True
            self.costs.mark_changed(peer)

    def undrain(self, peer: PeerId, cause: str) -> None:
        """Takes a `leave_alone` of that cause back."""
        if self.drains.remove_cause(peer, cause) and (server := self._servers.get(peer)):
            server.draining = False
            self.costs.mark_changed(peer)

    def is_left(self, peer: PeerId, cause: str) -> bool:
        return self.drains.has_cause(peer, cause)

    @property
    def left(self) -> Collection[PeerId]:
        """Servers that sessions are moved away from."""
        return self.drains.peers

    def why_left(self, peer: PeerId) -> str:
        """The first cause of it; "": it is not left."""
        return self.drains.first_cause(peer)

    def sole_blocks_of(self, peer: PeerId) -> list[int]:
        """Blocks of a server that no other holds which is linked, of its kind and not to be left itself."""
        server = self._servers[peer]
        return self._index_of(server).sole_blocks(server, lambda other: not other.draining)

    # ---- what it costs

    def add_hop(self, peer: PeerId, positions: int, rows: int) -> None:
        """A hop of ours is made there: KV for `positions`, and `rows` to run until it is at rest."""
        self.hops[peer] += 1
        if server := self._servers.get(peer):
            server.reserve(positions, rows)
            self.costs.mark_changed(peer)

    def remove_hop(self, peer: PeerId) -> None:
        """A hop of ours there is given up."""
        self.hops[peer] -= 1
        if not self.hops[peer]:
            del self.hops[peer]  # or every server that ever was would be remembered
        if server := self._servers.get(peer):
            server.placed_load -= 1
            self.costs.mark_changed(peer)

    def record_round_trip(self, peer: PeerId, seconds: float) -> None:
        """A question to a server was answered after so long."""
        if server := self._servers.get(peer):
            server.record_round_trip(seconds)
            self.costs.zones.record_round_trip(server.hello.zone, 1000 * seconds)
            self.costs.mark_changed(peer)

    # ---- health

    def health_status(self, peer: PeerId, now: float) -> HealthStatus:
        """How well a server does; a server that nothing is known about does well."""
        working = self.hops[peer] - self._idle_hops.get(peer, 0)
        standing = self.health.status(peer, now, working)
        return replace(standing, ejected=True) if peer in self.suspected else standing

    def eject(self, peer: PeerId, cause: str, now: float) -> None:
        """It was at fault: left out of new routes for a while, and then tried with one session."""
        server = self._servers.get(peer)
        if server is None:
            return
        self.costs.mark_changed(peer)
        if self.health.eject(peer, now, SLOW_EJECTION_TIME if cause == SLOW_CAUSE else BASE_EJECTION_TIME):
            self._emit(Ejected(peer, server.hello.model, cause))

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Its link is closed; if it is there, it will be found again."""
        self._emit(Unlink(peer, reason))

    def set_suspected(self, silent: frozenset[PeerId]) -> None:
        """These, and no others, have fallen silent."""
        for peer in silent ^ self.suspected:
            self.costs.mark_changed(peer)
        self.suspected = silent

    @property
    def on_trial(self) -> Collection[PeerId]:
        """Servers that are to carry one session, or carry it now, to show that they are well."""
        return self.health.on_canary

    def set_idle_hops(self, idle_hops: Mapping[PeerId, int]) -> None:
        """So many hops of servers on trial are of sessions that wait for nothing: no canary, they say nothing."""
        for peer in idle_hops.keys() | self._idle_hops.keys():
            if idle_hops.get(peer) != self._idle_hops.get(peer):
                self.costs.mark_changed(peer)
        self._idle_hops = idle_hops

    def ejection_over(self, peer: PeerId, now: float) -> bool:
        return now >= self.health.ejected_until(peer)

    def set_slowness(self, peer: PeerId, slowness: float) -> None:
        """Its block time, as a multiple of that of its like."""
        if self.health.set_slowness(peer, slowness):
            self.costs.mark_changed(peer)

    def can_spare(self, peer: PeerId, now: float, without: Collection[PeerId] = ()) -> bool:
        """Whether all its blocks are held by others that do well, those `without` not counted: an ejection never
        uncovers a block."""

        def does_well(other: Server) -> bool:
            name = other.hello.peer
            ejected = name in without or self.health_status(name, now).ejected
            return not ejected and not other.draining

        server = self._servers[peer]
        return not self._index_of(server).sole_blocks(server, does_well)

    def on_token(self, peers: Iterable[PeerId], now: float) -> None:
        """A session on these has a new token."""
        for peer in self.health.on_canary.intersection(peers):
            self.health.on_token(peer, now)
            self.costs.mark_changed(peer)

    def take_news(self) -> set[PeerId]:
        """Servers whose pace has changed since this was asked last."""
        return self.health.take_changed()

    def pace(self, peer: PeerId) -> StepTimes:
        return self.health.step_times(peer)

    def on_link_failed(self, reporter: PeerId, peer: PeerId, generation: int, now: float) -> None:
        if not (self.is_connected(reporter) and self.is_connected(peer)):
            return  # one of them died: nothing is known against the link between them
        self.links.record_failure(reporter, peer, generation, now)

    def bad_pairs(self, now: float) -> dict[frozenset[PeerId], int]:
        """Pairs to avoid, with how often each failed (`pairs.py`)."""
        return self.links.unreliable(now)

    def cover(
        self,
        model: str,
        variant: ModelVariant,
        blocks: tuple[int, int],
        now: float,
        *,
        between: tuple[PeerId | None, PeerId | None],
        needs: Needs,
        cheapest: bool = False,
    ) -> list[RouteHop] | None:
        """Servers for `blocks`, between two that stay: drawn among the best, so that gateways do not herd.

        Servers that drain, fail or are ejected only where nobody else holds a block; those on which the session hardly
        fits if there are no others at all.
        """

        def draw() -> float:
            return (self._draw() >> 11) / (1 << 53)

        return self.costs.choose_hops(
            (model, variant),
            lambda: self.servers_of(model, variant),
            blocks,
            between,
            needs,
            now,
            None if cheapest else draw,
        )

    def cost(
        self, model: str, variant: ModelVariant, route: Sequence[tuple[PeerId, int, int]], now: float
    ) -> float:
        """What a route of (peer, first, last) would cost somebody who takes it now, in ms."""
        return self.costs.route_cost((model, variant), lambda: self.servers_of(model, variant), route, now)

    def price(self, server: Server, now: float) -> HopCost:
        """What a hop on a linked server costs now, and why."""
        usual = self.costs.median_block_ms((server.hello.model, variant_of(server.hello)))
        return self.costs.hop_cost(server, usual, now)

    def max_length(self, model: str) -> int:
        """Most positions of a session that some route can hold; 0: no server of the model is linked."""
        kind = self.active_variant(model)
        return 0 if kind is None else self._indexes[model][kind].max_length

    @property
    def stopping(self) -> frozenset[PeerId]:
        """Servers that have said themselves that they are about to end: they take in nobody."""
        return self.drains.peers_with(STOPPING)

    def uncovered_blocks(self, model: str, without: frozenset[PeerId] = frozenset()) -> list[int]:
        """Blocks of the model that no linked server of its leading kind holds but for those `without`."""
        kind = self.active_variant(model)
        return [] if kind is None else self._indexes[model][kind].uncovered(without)
