"""The registry of servers this gateway is connected to, by model and variant.

Its parts have their own modules: `health` (scores and ejections), `drains` (causes), `links` (failures between
servers) and `costs` (route choice). Callers ask the parts directly; what concerns several of them is a method here.
Used by recovery, migration and detection. Knows nothing of sessions beyond the number of hops on each server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat, Hello
from modelswarm_gateway.core.interface.effects import CloseLink, Effect, Ejected
from modelswarm_gateway.core.routing.cost_model import CostModel
from modelswarm_gateway.core.servers.block_index import BlockIndex
from modelswarm_gateway.core.servers.drain_causes import SHUTDOWN_CAUSE, DrainCauses
from modelswarm_gateway.core.servers.health import (
    BASE_EJECTION_TIME,
    MAX_DISCONNECTED,
    SLOW_EJECTION_TIME,
    HealthStatus,
    HealthTable,
)
from modelswarm_gateway.core.servers.link_failures import LinkFailures
from modelswarm_gateway.core.servers.server import Server, sanitized
from modelswarm_gateway.core.servers.variant import (
    ModelVariant,
    is_valid,
    serves,
    variant_of,
    variants_of,
)

# Cause of an ejection that lasts longer, while sessions are migrated away.
SLOW_CAUSE = "slow"


class ServerRegistry:
    def __init__(
        self, failure_seconds: float, draw: Callable[[], int], emit: Callable[[Effect], None]
    ) -> None:
        """`failure_seconds`: time for which a failed link or a failed step counts. `draw`: 64 random bits."""
        self._emit = emit
        self._servers: dict[PeerId, Server] = {}
        # Servers that lost their link: Hello and time, oldest first.
        self._unlinked: dict[PeerId, tuple[Hello, float]] = {}
        # Connected servers, by model. An adapter's name is that of a model, too (`servers/variant.py`).
        self._indexes: dict[str, dict[ModelVariant, BlockIndex]] = {}
        self._active: dict[str, ModelVariant] = {}  # model -> the variant of new sessions
        self._readable: dict[str, frozenset[str]] = {}  # revisions with a tokenizer; absent: all
        self._changed: set[str] = set()  # models whose active variant may have changed
        self._changes = 0
        self.links = LinkFailures(failure_seconds)
        self.health = HealthTable()
        self.drains = DrainCauses()
        self.costs = CostModel(self.servers_of, self.health_status, draw, failure_seconds)
        self.hops: Counter[PeerId] = Counter()  # this gateway's own hops, by server
        self._idle_hops: Mapping[PeerId, int] = {}  # of those, the ones that no token is due on
        self.suspected: frozenset[PeerId] = frozenset()  # silent; kept by `detection/monitor.py`

    # ---- membership

    def register(self, hello: Hello, now: float = 0.0) -> bool:
        """Add a server that has connected. False: its Hello is not valid, so it is ignored."""
        if not is_valid(hello):
            return False
        self._remove(hello.peer)
        server = Server(hello, draining=hello.peer in self.drains.peers)
        self._servers[hello.peer] = server
        self._unlinked.pop(hello.peer, None)
        for model, variant in variants_of(hello).items():
            indexes = self._indexes.setdefault(model, {})
            indexes.setdefault(variant, BlockIndex(variant.n_blocks)).add(server)
        self._mark_changed(variants_of(hello))
        self.costs.add_server(server)
        self.health.add_server(hello.peer, now)
        return True

    def deregister(self, peer: PeerId, now: float = 0.0) -> None:
        """Remove a server whose link is down."""
        announced = self.drains.has_cause(peer, SHUTDOWN_CAUSE)
        self.undrain(peer, SHUTDOWN_CAUSE)  # a server that reconnects says so again
        server = self._servers.get(peer)
        if server is not None and self._remove(peer):
            self.health.remove_server(peer, announced=announced)
            if not announced:
                self._unlinked[peer] = server.hello, now
            if len(self._unlinked) > MAX_DISCONNECTED:
                del self._unlinked[next(iter(self._unlinked))]

    def _remove(self, peer: PeerId) -> bool:
        server = self._servers.pop(peer, None)
        if server is None:
            return False
        for model, variant in variants_of(server.hello).items():
            indexes = self._indexes[model]
            indexes[variant].remove(peer)
            if not indexes[variant].servers:
                del indexes[variant]
            if not indexes:
                del self._indexes[model]
        self._mark_changed(variants_of(server.hello))
        self.costs.remove_server(server)
        return True

    def _mark_changed(self, models: Iterable[str]) -> None:
        self._changed.update(models)
        self._changes += 1

    def variant_changes(self) -> int:
        """Return how often the active variant of some model may have changed."""
        return self._changes

    def _choose_active(self, model: str) -> None:
        """Prefer a variant whose servers hold all blocks, then one whose prompts can be read.

        Of several, the first is one that is whole without its draining servers: these take no new sessions. Then it is
        the one with most others, then the present one. A name that is a model's and an adapter's stands for the model.
        """
        readable = self._readable.get(model)
        draining = frozenset(self.drains.peers)
        indexes = self._indexes.get(model)
        if not indexes:
            self._active.pop(model, None)
            return
        current = self._active.get(model)
        self._active[model] = max(
            indexes,
            key=lambda variant: (
                variant.adapter is None,
                indexes[variant].is_complete,
                readable is None or variant.revision in readable,
                not indexes[variant].uncovered(draining),
                len(indexes[variant].servers)
                - sum(map(indexes[variant].servers.__contains__, draining)),
                variant == current,
            ),
        )

    def set_readable(self, model: str, revisions: frozenset[str]) -> None:
        """Set the revisions of a model whose prompts can be read."""
        if self._readable.get(model) != revisions:
            self._readable[model] = revisions
            self._mark_changed((model,))

    def active_variant(self, model: str) -> ModelVariant | None:
        """Return the variant that a new turn runs on; None if no server of the model is connected."""
        if model in self._changed:
            self._changed.discard(model)
            self._choose_active(model)
        return self._active.get(model)

    def kept_variant(
        self, model: str, variant: ModelVariant | None, hops: Iterable[tuple[PeerId, int, int]]
    ) -> ModelVariant | None:
        """Return the variant of a turn that has begun if it can go on there, else the active one.

        It can where all blocks are in its `hops` (server, first, last), or on servers that take new ones.
        """
        index = self._indexes.get(model, {}).get(variant) if variant is not None else None
        if index is None:
            return self.active_variant(model)
        missing = set(index.uncovered(frozenset(self.drains.peers)))
        for peer, first, last in hops:
            missing.difference_update(range(first, last) if peer in index.servers else ())
        return self.active_variant(model) if missing else variant

    def unlinked_since(self, model: str, time: float) -> set[PeerId]:
        """Return servers of a model that lost their link after `time`, and did not announce that they stop."""
        return {
            peer
            for peer, (hello, lost) in self._unlinked.items()
            if lost > time and serves(hello, model)
        }

    def is_connected(self, peer: PeerId) -> bool:
        return peer in self._servers

    def find_server(self, peer: PeerId) -> Server | None:
        return self._servers.get(peer)

    def __iter__(self) -> Iterator[Server]:
        return iter(self._servers.values())

    def servers_of(self, model: str, variant: ModelVariant | None) -> list[Server]:
        index = self._indexes.get(model, {}).get(variant) if variant is not None else None
        return [] if index is None else list(index.servers.values())

    def hellos_of(self, model: str) -> list[Hello]:
        """Return the Hellos of the model's servers of the active variant."""
        return [each.hello for each in self.servers_of(model, self.active_variant(model))]

    def older_than(self, model: str, version: tuple[int, int]) -> frozenset[PeerId]:
        """Return the connected servers of a model whose links have an older version."""
        hellos = [each.hello for each in self if serves(each.hello, model)]
        return frozenset(hello.peer for hello in hellos if hello.version < version)

    # ---- blocks

    def replicas_of(self, server: Server) -> Collection[Server]:
        """Return the connected servers that hold the same blocks as `server`, itself included."""
        return self._index_of(server).replicas_of(server)

    def _index_of(self, server: Server) -> BlockIndex:
        return self._indexes[server.hello.model][variant_of(server.hello)]

    def sole_blocks_of(self, peer: PeerId) -> list[int]:
        """Return the blocks of a server that no other connected server of its variant holds, drained ones left out."""
        server = self._servers[peer]
        return self._index_of(server).sole_blocks(server, lambda other: not other.draining)

    def can_spare(self, peer: PeerId, now: float, without: Collection[PeerId] = ()) -> bool:
        """True if other healthy servers hold all its blocks, those `without` not counted.

        An ejection never uncovers a block.
        """

        def is_healthy(other: Server) -> bool:
            name = other.hello.peer
            ejected = name in without or self.health_status(name, now).ejected
            return not ejected and not other.draining

        server = self._servers[peer]
        return not self._index_of(server).sole_blocks(server, is_healthy)

    def max_length(self, model: str, variant: ModelVariant | None = None) -> int:
        """Return the greatest session length some route of a variant can hold, by default of the active one.

        0 if no server of the model is connected.
        """
        variant = variant or self.active_variant(model)
        return 0 if variant is None else self._indexes[model][variant].max_length

    def uncovered_blocks(self, model: str, without: frozenset[PeerId] = frozenset()) -> list[int]:
        """Return the blocks that no connected server of the active variant holds, those `without` not counted."""
        variant = self.active_variant(model)
        return [] if variant is None else self._indexes[model][variant].uncovered(without)

    # ---- drains

    def drain(self, peer: PeerId, cause: str) -> None:
        """Give the server no new hops. Remembered while its link is down: the server may reconnect."""
        self.drains.add_cause(peer, cause)
        if server := self._servers.get(peer):
            self._set_draining(server, True)

    def undrain(self, peer: PeerId, cause: str) -> None:
        """Take back a `drain` of that cause."""
        if self.drains.remove_cause(peer, cause) and (server := self._servers.get(peer)):
            self._set_draining(server, False)

    def _set_draining(self, server: Server, draining: bool) -> None:
        if server.draining != draining:
            server.draining = draining
            self._mark_changed(variants_of(server.hello))
        self.costs.mark_changed(server.hello.peer)

    # ---- load and distance

    def on_heartbeat(self, peer: PeerId, heartbeat: Heartbeat, now: float) -> None:
        if server := self._servers.get(peer):
            heartbeat = sanitized(heartbeat)
            server.on_heartbeat(heartbeat, now)
            server.other_sessions = max(0, heartbeat.sessions - self.hops[peer])
            self.costs.mark_changed(peer)
            self.health.record_heartbeat(peer, heartbeat, now)
            if heartbeat.draining:
                self.drain(peer, SHUTDOWN_CAUSE)

    def add_hop(self, peer: PeerId, positions: int, rows: int) -> None:
        """Count a new hop of this gateway: KV for `positions`, and `rows` to run before it is quiescent."""
        self.hops[peer] += 1
        if server := self._servers.get(peer):
            server.reserve(positions, rows)
            self.costs.mark_changed(peer)

    def remove_hop(self, peer: PeerId) -> None:
        """Discount a hop of this gateway that is closed."""
        self.hops[peer] -= 1
        if not self.hops[peer]:
            del self.hops[peer]  # or every server that ever was would be remembered
        if server := self._servers.get(peer):
            server.placed_load -= 1
            self.costs.mark_changed(peer)

    def set_idle_hops(self, idle_hops: Mapping[PeerId, int]) -> None:
        """Set the number of hops, by server on canary, that no token is due on: they prove nothing about its health."""
        for peer in idle_hops.keys() | self._idle_hops.keys():
            if idle_hops.get(peer) != self._idle_hops.get(peer):
                self.costs.mark_changed(peer)
        self._idle_hops = idle_hops

    def record_round_trip(self, peer: PeerId, seconds: float) -> None:
        """Take the time between a question to a server and its answer."""
        if server := self._servers.get(peer):
            server.record_round_trip(seconds)
            self.costs.zones.record_round_trip(server.hello.zone, 1000 * seconds)
            self.costs.mark_changed(peer)

    # ---- health

    def health_status(self, peer: PeerId, now: float) -> HealthStatus:
        """Return the health of a server; a server without history is healthy."""
        working = self.hops[peer] - self._idle_hops.get(peer, 0)
        status = self.health.status(peer, now, working)
        return replace(status, ejected=True) if peer in self.suspected else status

    def eject(self, peer: PeerId, cause: str, now: float) -> None:
        """Leave a faulty server out of new routes for a while; then it must pass a canary session."""
        server = self._servers.get(peer)
        if server is None:
            return
        self.costs.mark_changed(peer)
        seconds = SLOW_EJECTION_TIME if cause == SLOW_CAUSE else BASE_EJECTION_TIME
        if self.health.eject(peer, now, seconds):
            self._emit(Ejected(peer, server.hello.model, cause))

    def on_step_failed(self, peer: PeerId, now: float) -> None:
        """A step failed on the server: its sessions may do better elsewhere."""
        if server := self._servers.get(peer):
            server.failed_at = now
            self.eject(peer, "failed", now)

    def on_link_failed(self, reporter: PeerId, peer: PeerId, generation: int, now: float) -> None:
        """Count a failure of the link between two servers, unless one of them is gone: that explains it."""
        if self.is_connected(reporter) and self.is_connected(peer):
            self.links.record_failure(reporter, peer, generation, now)

    def on_token(self, peers: Iterable[PeerId], now: float) -> None:
        """A session on these servers has a new token: each passes its canary."""
        for peer in self.health.on_canary.intersection(peers):
            self.health.on_token(peer, now)
            self.costs.mark_changed(peer)

    def set_slowness(self, peer: PeerId, slowness: float) -> None:
        """Set its block time as a multiple of that of its peer group."""
        if self.health.set_slowness(peer, slowness):
            self.costs.mark_changed(peer)

    def set_suspected(self, silent: frozenset[PeerId]) -> None:
        """Set the servers that are silent: these and no others."""
        for peer in silent ^ self.suspected:
            self.costs.mark_changed(peer)
        self.suspected = silent

    def disconnect(self, peer: PeerId, reason: str) -> None:
        """Close the link; a server that still runs is discovered again."""
        self._emit(CloseLink(peer, reason))
