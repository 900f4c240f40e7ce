"""The cost model of route choice: the present cost of a hop on every server.

A part of the server registry (`registry.costs`). Heartbeats, hops and faults mark a server as changed. The next choice
computes the cost of the changed servers again, and of a few others in turn, because costs also change with time.
Costs-to-go are cached for a moment. Their age matters little, since every hop is sampled at present costs. Knows no
sessions beyond what one asks for (`Needs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.routing.cost_table import CostTable
from modelswarm_gateway.core.routing.path_search import LAST_RESORT, Floats, RouteHop
from modelswarm_gateway.core.routing.zones import ZoneDelays
from modelswarm_gateway.core.servers.health import HealthStatus
from modelswarm_gateway.core.servers.numerics import BlockClass
from modelswarm_gateway.core.servers.server import (
    DEFAULT_BLOCK_MS,
    HOP_OVERHEAD_MS,
    RTT_NOISE_MS,
    Server,
    kv_wait_ms,
)
from modelswarm_gateway.core.servers.variant import ModelVariant, variant_of, variants_of

# Greatest age in seconds of cached costs-to-go, unless a server has become or ceased to be a last resort.
CACHE_SECONDS = 0.05
# Number of cached costs-to-go in one table.
MAX_CACHED = 64
# Cost in ms of a recovery that stays in a failure domain it has lost a hop in.
LOST_DOMAIN_MS = 50.0
# Cost in ms of a hop in another numerics class than its blocks ran in. It is more than a usual step or a lost failure
# domain, and less than a wait for KV.
OTHER_NUMERICS_MS = 500.0
# Greatest cost in ms of a block, a hop or its KV, whatever is measured or declared; less than a last resort.
MAX_COST_MS = 1e5
# Cost in ms of a server that can never hold the session.
TOO_SHORT_MS = 100 * LAST_RESORT
# Cost in ms of a tail with another version of the grammar's library, where one with the same is connected. It is more
# than any measured cost, and less than a last resort.
OTHER_GRAMMAR_MS = 1e7

Key: TypeAlias = tuple[str, ModelVariant]


@dataclass(frozen=True, slots=True)
class Needs:
    """The requirements of one session on the servers that are to carry some of its blocks."""

    max_length: int = 0  # positions it may reach
    kv_positions: int = 0  # positions of KV to be reserved on a new hop
    for_recovery: bool = False  # may use the pages reserved for recovery (R12, admission)
    lost_domains: frozenset[str] = frozenset()  # failure domains of the hops it lost
    excluded: frozenset[PeerId] = frozenset()
    grammar: str = ""  # library and version that should run its grammar; empty: it has none
    numerics: tuple[BlockClass, ...] = ()  # classes that its blocks ran in last


@dataclass(frozen=True, slots=True)
class HopCost:
    """The cost of one server, and the parts it is made of; the parts are for explanations."""

    block_ms: float  # of a block, health included
    hop_ms: float  # once per hop, health included; KV wait left out
    queue_ms: float
    load: float
    status: HealthStatus
    score: float  # divides the costs of its blocks, its hop and its KV
    last_resort: bool


class CostModel:
    """One cost table per model and variant; also one per adapter, whose name is that of a model."""

    def __init__(
        self,
        servers_of: Callable[[str, ModelVariant], Sequence[Server]],
        status_of: Callable[[PeerId, float], HealthStatus],
        draw: Callable[[], int],
        failing_seconds: float,
    ) -> None:
        """`draw`: 64 random bits. `failing_seconds`: time after a failed step in which a server is a last resort."""
        self._servers_of = servers_of
        self._status_of = status_of
        self._draw = draw
        self._failing_seconds = failing_seconds
        self.zones = ZoneDelays()
        self._tables: dict[Key, CostTable] = {}
        # By table: a server with adapters is in one for each of them.
        self._changed: dict[Key, set[PeerId]] = {}
        self._keys: dict[PeerId, tuple[Key, ...]] = {}  # tables of each connected server

    def add_server(self, server: Server) -> None:
        """A server has connected. If it replaces one of the same name, `remove_server` comes first."""
        keys = self._keys[server.hello.peer] = tuple(variants_of(server.hello).items())
        for key in keys:
            if table := self._tables.get(key):
                table.add_server(server)

    def remove_server(self, server: Server) -> None:
        for key in self._keys.pop(server.hello.peer, ()):
            if table := self._tables.get(key):
                table.remove_server(server.hello.peer)
                if not table.has_servers:  # no one may ask for this variant again
                    del self._tables[key]
                    self._changed.pop(key, None)

    def mark_changed(self, peer: PeerId) -> None:
        """Compute the cost of this server again at the next choice."""
        for key in self._keys.get(peer, ()):
            if key in self._tables:
                self._changed.setdefault(key, set()).add(peer)

    def hop_cost(self, server: Server, now: float) -> HopCost:
        """Return the cost of a hop on a connected server, with its parts."""
        table = self._tables.get(_key(server))
        median_ms = DEFAULT_BLOCK_MS if table is None else table.median_block_ms
        return self._hop_cost(server, median_ms, now)

    def _hop_cost(self, server: Server, median_ms: float, now: float) -> HopCost:
        status = self._status_of(server.hello.peer, now)
        score, block_ms = status.score, server.block_ms(median_ms, now)
        if status.canary:  # its last step may be the one in which it was frozen
            score, block_ms = 1.0, min(block_ms, median_ms)
        failing = now - server.failed_at <= self._failing_seconds
        nearest = self.zones.nearest_ms(server.hello.zone)
        # The one-way delay beyond the nearest server of its zone.
        distance = max(0.0, (server.rtt_ms or 0.0) - nearest - RTT_NOISE_MS) / 2
        hop_ms = server.queue_ms + distance + HOP_OVERHEAD_MS * server.slowdown
        return HopCost(
            block_ms=min(MAX_COST_MS, block_ms / score),
            hop_ms=min(MAX_COST_MS, hop_ms / score),
            queue_ms=server.queue_ms,
            load=server.load,
            status=status,
            score=score,
            last_resort=server.draining or status.ejected or failing,
        )

    # ---- choosing

    def choose_hops(
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
        """Return hops for `blocks` between two neighbours that stay; None if a block has no server.

        Hops are sampled among the best servers, so that gateways do not herd; with `cheapest` the best ones are taken.
        Servers that drain, fail or are ejected are taken only for blocks that no other server holds. Servers that are
        too short for the session are taken only if there are no others at all.
        """
        table = self._current_table((model, variant), now)
        if table is None:
            return None
        before, after = (self._zone(table, peer) for peer in between)
        if blocks[1] < variant.n_blocks:
            needs = replace(needs, grammar="")  # the tail stays
        extra, question = _extra_hop_ms(table, needs, blocks)
        hop_ms = table.hop_ms if extra is None else table.hop_ms + extra
        to_go = table.cached.get((blocks, after, question))
        if to_go is None:
            if len(table.cached) >= MAX_CACHED:
                table.cached.clear()
            to_go = table.cost_to_go(blocks, hop_ms, after)
            table.cached[blocks, after, question] = to_go
        draw = None if cheapest else self._draw_fraction
        return table.sample_path(blocks, to_go, hop_ms, before, draw)

    def spans_by_cost(
        self, model: str, variant: ModelVariant, preferred: Collection[PeerId], now: float
    ) -> dict[PeerId, tuple[int, int]]:
        """Return the blocks [first, last) of each server: `preferred` and then cheap ones first, last resorts last."""
        table = self._current_table((model, variant), now)
        if table is None:
            return {}
        peers, rows = list(table.row_of), list(table.row_of.values())
        others = np.array([peer not in preferred for peer in peers])
        order = np.lexsort((table.hop_ms[rows], others, table.last_resort_ms[rows])).tolist()
        first, last = table.first[rows].tolist(), table.last[rows].tolist()
        return {peers[at]: (first[at], last[at]) for at in order}

    def route_cost(
        self,
        model: str,
        variant: ModelVariant,
        route: Sequence[tuple[PeerId, int, int]],
        now: float,
    ) -> float:
        """Return the cost in ms of a route of (peer, first, last) for a new session."""
        table = self._current_table((model, variant), now)
        return math.inf if table is None else table.path_cost(route)

    def _draw_fraction(self) -> float:
        return (self._draw() >> 11) / (1 << 53)

    @staticmethod
    def _zone(table: CostTable, peer: PeerId | None) -> str | None:
        """Return the zone of a server; None also for one that is not in the table: its place does not matter."""
        row = None if peer is None else table.row_of.get(peer)
        server = None if row is None else table.servers[row]
        return None if server is None else server.hello.zone

    # ---- tables

    def _current_table(self, key: Key, now: float) -> CostTable | None:
        table, changed = self._tables.get(key), self._changed.pop(key, set())
        new = None if table is None else table.apply_membership()
        if table is None or new is None:
            self._tables.pop(key, None)
            servers = self._servers_of(*key)
            if not servers:
                return None
            table = self._tables[key] = CostTable(servers, self.zones)
            new = list(range(len(table.servers)))
        rows = table.rows_to_update(changed.intersection(table.row_of))
        for row, server in table.occupied(rows.union(new)):
            cost = self._hop_cost(server, table.median_block_ms, now)
            last = cost.last_resort
            table.set_cost(row, cost.hop_ms, cost.block_ms, cost.score, last_resort=last)
        expired = abs(now - table.refreshed_at) >= CACHE_SECONDS
        if table.must_refresh or (table.is_outdated and expired):
            table.refresh(now)
        return table


def _key(server: Server) -> Key:
    return server.hello.model, variant_of(server.hello)


def _grammar_ms(table: CostTable, version: str) -> Floats:
    """Return the cost of a tail that has no grammars, or those of another version."""
    tails = table.last == table.n_blocks
    same = tails & (table.grammar == table.grammar_id(version))
    cost = np.zeros(len(table.servers))
    if same.any():
        cost[tails & ~same] = OTHER_GRAMMAR_MS
    cost[tails & (table.grammar == table.grammar_id(""))] = TOO_SHORT_MS
    return cost


def _has_other_numerics(
    table: CostTable, ran: Sequence[BlockClass], blocks: tuple[int, int]
) -> npt.NDArray[np.bool_]:
    """Return, by server, whether it has another class than one of its own among `blocks` ran in."""
    other = np.zeros(len(table.servers), dtype=np.bool_)
    for first, last, numerics in ran:
        start, end = max(first, blocks[0]), min(last, blocks[1])
        if numerics and start < end:
            overlaps = (table.first < end) & (table.last > start)
            other |= overlaps & (table.numerics != table.numerics_id(numerics))
    return other


def _extra_hop_ms(
    table: CostTable, needs: Needs, blocks: tuple[int, int]
) -> tuple[Floats | None, object]:
    """Return the cost of a hop for this session beyond the common cost, and a key for it; None if there is none."""
    asked: list[object] = []
    extra = np.zeros(len(table.servers))
    wait = kv_wait_ms(
        needs.kv_positions, needs.for_recovery, table.free_pages, table.total_pages, table.page_size
    )
    if wait.any():  # longer on a server in bad health, as its steps are
        extra += np.minimum(MAX_COST_MS, wait / table.score)
        asked.append((needs.kv_positions, needs.for_recovery))
    if needs.max_length > table.max_length.min():
        extra[table.max_length < needs.max_length] += TOO_SHORT_MS
        asked.append(needs.max_length)
    zones = [table.zones[zone] for zone in needs.lost_domains if zone in table.zones]
    if zones:
        extra[np.isin(table.zone, zones)] += LOST_DOMAIN_MS
        asked.append(needs.lost_domains)
    if needs.grammar:
        cost = _grammar_ms(table, needs.grammar)
        extra += cost
        asked.append(needs.grammar)
    other = _has_other_numerics(table, needs.numerics, blocks)
    if other.any():
        extra[other] += OTHER_NUMERICS_MS
        asked.append(needs.numerics)
    out = [table.row_of[peer] for peer in needs.excluded if peer in table.row_of]
    if out:
        extra[out] = math.inf
        asked.append(frozenset(out))
    return (extra, tuple(asked)) if asked else (None, None)
