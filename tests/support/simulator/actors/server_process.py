"""The shell of a simulated server: does in virtual time what the real node and engine do around the core.

One boot of a server: its core, its hash model, one step at a time. Decides nothing about the protocol: items go in,
effects go out. `Tools` is shared by all processes of a world.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from support.simulator.clock import Clock
from support.simulator.network import Codec, Endpoint, Network, over_wire
from support.simulator.scenario import Scenario
from support.simulator.trace import Trace, Violation

from modelswarm.protocol.heartbeat import BUSY_SECONDS, HeartbeatTimer
from modelswarm.protocol.identity import Address, Handle, PeerId, peer_id
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    FenceAck,
    Hello,
    Item,
    Lane,
    Role,
    Rows,
    Send,
    StartEpoch,
    reply_address,
)
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_serving.core.server import GrammarRequest, ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import BatchItem, KvCopy, ModelShape, Result, Task
from modelswarm_serving.model.hash_model import HashModel

MODEL = "hash"
ROW_BYTES = 8
GRAMMARS = "hash 1"  # the version of every tail's grammars
GRAMMAR_SECONDS = 0.001  # until a grammar is compiled


MakeServer: TypeAlias = Callable[[ServerSettings, ModelShape, Callable[[], int]], ServerCore]
MakeGateway: TypeAlias = Callable[
    [GatewaySettings, PeerId, int, Callable[[], int]],
    GatewayCore,
]


@dataclass(frozen=True, slots=True)
class Cores:
    """Factories of the cores under test, and the codec: those of the product, unless a bug is planted."""

    server: MakeServer = ServerCore
    gateway: MakeGateway = GatewayCore
    codec: Codec = over_wire
    new_peer_per_boot: bool = True  # a restarted server has another peer id


@dataclass(slots=True)
class Tools:
    """The parts that all processes of a world share."""

    scenario: Scenario
    clock: Clock
    network: Network
    trace: Trace
    cores: Cores
    draw: Callable[[], int]  # 64 random bits


class ServerProcess:
    """One boot. A restart is a new ServerProcess under the same name and target."""

    def __init__(
        self,
        tools: Tools,
        name: str,
        span: tuple[int, int],
        boot: int,
        on_start_epoch: Callable[[ServerProcess, StartEpoch], None],
    ) -> None:
        self._tools = tools
        self.name = name
        self.span = span
        self.boot = boot
        self.alive = True
        self.resumes_at = 0.0
        self.replaces: tuple[PeerId, ...] = ()
        nonce = f"boot{boot}" if tools.cores.new_peer_per_boot else "none"
        self.address = Address(peer_id(name, 1, nonce), f"{name}:1")
        layout = tools.scenario.layout
        self.shape = ModelShape(
            first=span[0],
            last=span[1],
            n_blocks=layout.n_blocks,
            row_bytes=ROW_BYTES,
            page_size=layout.page_size,
            total_pages=layout.total_pages,
            max_length=layout.max_length,
            vocab_size=tools.scenario.vocab,
            hidden_bytes=ROW_BYTES,
        )
        settings = ServerSettings(
            address=self.address,
            grant_seconds=layout.grant_seconds,
            lease_seconds=layout.lease_seconds,
            token_budget=layout.token_budget,
            row_window=layout.row_window,
            in_flight_bytes=layout.in_flight_bytes,
            replay_bytes=layout.replay_bytes,
            fork_step_bytes=layout.fork_step_bytes,
        )
        self.core = tools.cores.server(settings, self.shape, tools.draw)
        self.model = HashModel(self.shape)
        self._step_began = 0.0
        self.rows = 0
        self.forked = 0  # positions copied from parents
        self.evicted = False  # the simulator has dropped retained rows
        self._on_start_epoch = on_start_epoch
        self._work: Sequence[Task] = ()
        self._frozen_until = 0.0
        self._heartbeats = HeartbeatTimer.for_server(lambda: self._rng.random())
        self._rng = random.Random(f"server/{tools.scenario.seed}/{name}/{boot}")

    @property
    def hello(self) -> Hello:
        shape = self.shape
        return Hello(
            version=PROTOCOL_VERSION,
            peer=self.address.peer,
            role=Role.SERVER,
            link="",
            lane=Lane.LIVE,
            target=self.address.target,
            model=MODEL,
            revision="1",
            first=shape.first,
            last=shape.last,
            n_blocks=shape.n_blocks,
            row_bytes=shape.row_bytes,
            max_length=shape.max_length,
            total_pages=shape.total_pages,
            page_size=shape.page_size,
            grammar=GRAMMARS if shape.is_tail else "",
        )

    # -- the network calls these -----------------------------------------------------------

    def on_link_up(self, other: Endpoint) -> None:
        role = Role.SERVER if other.address.target else Role.GATEWAY
        self.core.on_peer_connected(
            other.address.peer, role, self._tools.clock.now, replaces=other.replaces
        )
        if role is Role.GATEWAY:
            self._heartbeats.on_peer_connected(other.address.peer)
        self._pump()

    def on_link_down(self, peer: PeerId) -> None:
        self._heartbeats.on_peer_lost(peer)
        self.core.on_peer_lost(peer, self._tools.clock.now)
        self._pump()

    def on_item(self, peer: PeerId, item: Item) -> None:
        if isinstance(item, StartEpoch):
            self._on_start_epoch(self, item)
        if isinstance(item, Rows) and item.kv_copy and self._lacks_retained_rows(item):
            self.evicted = True
        self.core.receive(peer, item, self._tools.clock.now)
        self._pump()

    def _lacks_retained_rows(self, rows: Rows) -> bool:
        """True for a part of a copy from a hop that ends at another boundary, or that has evicted its rows."""
        hop = self.core._fencing.hops.get(rows.handle)
        blocks = 0 if hop is None else hop.last - hop.first
        return len(rows.payload) == rows.count * blocks * self.shape.kv_bytes

    # -- the engine ------------------------------------------------------------------------

    def freeze(self, seconds: float) -> None:
        """Stop the engine for some seconds; links are still read."""
        self._frozen_until = self._tools.clock.now + seconds
        self._disturb(self._frozen_until)

    def evict(self) -> bool:
        """Drop the retained rows of a hop, as when memory is short."""
        handles = list(self.core._replay_log._runs)
        if handles:
            self._evict(self._rng.choice(handles))
        return bool(handles)

    def _evict(self, handle: Handle) -> None:
        self.evicted = True
        self.core._replay_log.drop(handle)

    def start_draining(self) -> None:
        """Begin a graceful stop: refuse new hops."""
        self.core.start_draining(self._tools.clock.now)
        self._pump()

    def stop(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT some seconds later."""
        self.resumes_at = max(self.resumes_at, self._tools.clock.now + seconds)
        self._disturb(self.resumes_at)

    def _disturb(self, until: float) -> None:
        self._tools.network.disturbances.record(until, self.name)

    def tick(self) -> None:
        """Tick the core as often as the node does."""
        clock = self._tools.clock
        if not self.alive:
            return
        if clock.now < self.resumes_at:
            clock.at(self.resumes_at, self.tick)
            return
        self.core.tick(clock.now)
        self._pump()
        self._send_heartbeats()
        clock.after(BUSY_SECONDS, self.tick)

    def _send_heartbeats(self) -> None:
        due = self._heartbeats.take_due(self._tools.clock.now, self.core.busy_gateways)
        if due:
            heartbeat = self.core.heartbeat()
            for peer in due:
                self._send(Send(reply_address(peer), Lane.LIVE, heartbeat))

    def _send(self, send: Send) -> None:
        self._tools.network.send(self.address.peer, send)

    def _pump(self) -> None:
        core, now = self.core, self._tools.clock.now
        for request in core.take_grammar_requests():
            self._tools.clock.after(GRAMMAR_SECONDS, self._on_grammar_ready, request)
        if not self._work:
            self._work = core.plan_step(now)
            if self._work:
                self._step_began = now
                self._tools.clock.at(max(self._frozen_until, now + self._step_time()), self._finish)
        chance = self._tools.scenario.conditions.evict_chance
        for send in core.take_sends():
            if chance and isinstance(send.item, FenceAck) and self._rng.random() < chance:
                self._evict(send.item.server_handle)
            self._heartbeats.on_sent(send.to.peer, now)
            self._send(send)

    def _on_grammar_ready(self, request: GrammarRequest) -> None:
        """The grammar is compiled, perhaps after the hop has ended."""
        clock = self._tools.clock
        if not self.alive:
            return
        if clock.now < self.resumes_at:
            clock.at(self.resumes_at, self._on_grammar_ready, request)
            return
        self.core.on_grammar_ready(request, None, clock.now)
        self._pump()

    def _step_time(self) -> float:
        conditions = self._tools.scenario.conditions
        if conditions.slow_step_chance and self._rng.random() < conditions.slow_step_chance:
            seconds = conditions.slow_step * self._rng.random()
            self._disturb(self._tools.clock.now + seconds)
            return seconds
        rows = _count_rows(self._work) if conditions.row_seconds else 0
        return conditions.step_seconds * (0.5 + self._rng.random()) + conditions.row_seconds * rows

    def _count_long_step(self, rows: int, took: float) -> None:
        """Count a step of rows that took longer than any undisturbed one: it was slow, frozen or stopped."""
        conditions = self._tools.scenario.conditions
        if rows and took > 1.5 * conditions.step_seconds + conditions.row_seconds * rows:
            self._tools.network.disturbances.long_steps[self.address.peer] += 1

    def _finish(self) -> None:
        clock = self._tools.clock
        if not self.alive:
            return
        if clock.now < self.resumes_at:
            clock.at(self.resumes_at, self._finish)
            return
        work, self._work = self._work, ()
        now = clock.now
        self._count_long_step(_count_rows(work), now - self._step_began)
        poisoned = self._poisoned()
        chance = self._tools.scenario.conditions.failed_step_chance
        is_faulty = (
            chance and now < self._tools.scenario.faults.until and self._rng.random() < chance
        )
        if is_faulty or poisoned:
            self._fail(work, poisoned, now)
        else:
            self.core.finish_step(self._run_step(work), now)
        self.rows += _count_rows(work)
        self.forked += sum(task.count for task in work if isinstance(task, KvCopy))
        self._pump()

    def _run_step(self, work: Sequence[Task]) -> list[Result]:
        """Run the tasks. The model raises only for tasks that a correct core never plans."""
        try:
            return self.model.step(work)
        except ValueError as error:
            raise Violation(f"{self.name}: a step raises: {error}") from error

    def _poisoned(self) -> list[int]:
        """Return the indexes of the step's tasks that fail because of their sessions."""
        load = self._tools.scenario.load
        if not load.poisoned:
            return []
        return [
            index
            for index, (hop, _) in enumerate(self.core._steps._running)
            if load.is_poisoned(hop.session) and self._rng.random() < load.poison_chance
        ]

    def _fail(self, work: Sequence[Task], poisoned: Sequence[int], now: float) -> None:
        """Let the whole step raise, or some of its tasks fail."""
        self._tools.trace.note(now, self.name, "step fails")
        self._disturb(now)
        if self._rng.random() < 0.5:
            self.core.fail_step("injected failure of the step", now)
            return
        results = self.model.step(work)
        for index in poisoned or [self._rng.randrange(len(results))]:
            results[index] = Result(error="injected failure of the task")
        self.core.finish_step(results, now)


def _count_rows(tasks: Sequence[Task]) -> int:
    """Return the number of computed rows; KV copies have none."""
    return sum(task.count for task in tasks if isinstance(task, BatchItem))
