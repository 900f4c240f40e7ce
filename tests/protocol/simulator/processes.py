"""The shells of a simulated swarm: what a real node does around a core, in virtual time.

`ServerProcess` is one boot of a server (core, hash model, one step at a time); `GatewayProcess` is the gateway (core,
directory, dialling). Neither decides anything about the protocol: they pass items in and effects out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from protocol.simulator.clock import Clock
from protocol.simulator.network import Endpoint, Network
from protocol.simulator.scenario import Scenario
from protocol.simulator.trace import Trace

from modelswarm.protocol.identity import Address, PeerId, peer_id
from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Beat,
    Hello,
    Item,
    Lane,
    Role,
    Send,
    reply_address,
)
from modelswarm_gateway.core.effects import Effect, GatewaySettings
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_serving.core.server import ServerCore, ServerSettings
from modelswarm_serving.model.base import ModelShape, Result, Work
from modelswarm_serving.model.hash import HashModel

MODEL = "hash"
ROW_BYTES = 8
TICK = 0.25
NEVER = float("inf")
GATEWAY_BEAT = 5.0


@dataclass(frozen=True, slots=True)
class Cores:
    """Which classes play the parts: the real ones, unless a bug is planted."""

    server: type[ServerCore] = ServerCore
    gateway: type[GatewayCore] = GatewayCore
    nonce: bool = True  # a restarted server is another peer


@dataclass(slots=True)
class Tools:
    """What every process of one world shares."""

    scenario: Scenario
    clock: Clock
    network: Network
    trace: Trace
    cores: Cores
    draw: Callable[[], int]  # 64 random bits


class ServerProcess:
    """One boot. A restart is a new ServerProcess under the same name and target."""

    def __init__(self, tools: Tools, name: str, span: tuple[int, int], boot: int) -> None:
        self._tools = tools
        self.name = name
        self.span = span
        self.boot = boot
        self.alive = True
        nonce = f"boot{boot}" if tools.cores.nonce else "none"
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
        )
        # a repeated create may open a hop that nobody asked for; all others are closed, or freed by Live
        may_expire = tools.scenario.deadlines or tools.scenario.weather.duplicate_chance > 0
        settings = ServerSettings(
            address=self.address,
            grant_seconds=layout.grant_seconds if may_expire else NEVER,
            lease_seconds=layout.lease_seconds if may_expire else NEVER,
            token_budget=layout.token_budget,
            row_window=layout.row_window,
        )
        self.core = tools.cores.server(settings, self.shape, tools.draw)
        self.model = HashModel(self.shape)
        self.rows = 0
        self._work: Sequence[Work] = ()
        self._frozen_until = 0.0
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
        )

    # -- the network calls these -----------------------------------------------------------

    def linked(self, other: Endpoint) -> None:
        role = Role.SERVER if other.address.target else Role.GATEWAY
        self.core.connected(other.address.peer, role, self._tools.clock.now)
        self._pump()

    def unlinked(self, peer: PeerId) -> None:
        self.core.disconnected(peer, self._tools.clock.now)
        self._pump()

    def received(self, peer: PeerId, item: Item) -> None:
        self.core.receive(peer, item, self._tools.clock.now)
        self._pump()

    # -- the engine ------------------------------------------------------------------------

    def freeze(self, seconds: float) -> None:
        """The engine does not get on for so long; links are read all the same."""
        self._frozen_until = self._tools.clock.now + seconds

    def tick(self) -> None:
        if self.alive:
            self.core.tick(self._tools.clock.now)
            self._pump()
            self._tools.clock.after(TICK, self.tick)

    def _pump(self) -> None:
        core, now, network = self.core, self._tools.clock.now, self._tools.network
        if not self._work:
            self._work = core.plan_step(now)
            if self._work:
                self._tools.clock.at(max(self._frozen_until, now + self._step_time()), self._finish)
        for send in core.drain():
            network.send(self.address.peer, send)

    def _step_time(self) -> float:
        weather = self._tools.scenario.weather
        if weather.slow_step_chance and self._rng.random() < weather.slow_step_chance:
            return weather.slow_step * self._rng.random()
        return weather.step * (0.5 + self._rng.random())

    def _finish(self) -> None:
        if not self.alive:
            return
        work, self._work = self._work, ()
        now = self._tools.clock.now
        chance = self._tools.scenario.weather.failed_step_chance
        if chance and now < self._tools.scenario.faults.until and self._rng.random() < chance:
            self._fail(work, now)
        else:
            self.core.finish_step(self.model.step(work), now)
        self.rows += sum(each.count for each in work)
        self._pump()

    def _fail(self, work: Sequence[Work], now: float) -> None:
        """The whole step raises, or one session's part of it fails."""
        self._tools.trace.note(now, self.name, "step fails")
        if self._rng.random() < 0.5:
            self.core.fail_step("the step failed, says the simulator", now)
            return
        results = self.model.step(work)
        results[self._rng.randrange(len(results))] = Result(error="failed, says the simulator")
        self.core.finish_step(results, now)


class GatewayProcess:
    """The gateway: dials every living server it knows of, again and again."""

    def __init__(self, tools: Tools, deliver: Callable[[list[Effect]], None]) -> None:
        self._tools = tools
        self._deliver = deliver
        self.name = "gateway"
        self.alive = True
        self.address = Address(peer_id("gateway", 1, "boot0"), "")
        self._rng = random.Random(f"gateway/{tools.scenario.seed}")
        self._known: dict[PeerId, Address] = {}
        self.core = tools.cores.gateway(self._settings(), self.address.peer, 1, tools.draw)

    def _settings(self) -> GatewaySettings:
        layout = self._tools.scenario.layout
        settings = GatewaySettings(
            hold_seconds=300.0, input_tokens=layout.input_tokens, short_input=layout.short_input
        )
        if self._tools.scenario.deadlines:
            return settings
        return replace(settings, hold_seconds=NEVER, fenced_seconds=NEVER)

    # -- the directory ---------------------------------------------------------------------

    def learn(self, address: Address) -> None:
        self._known[address.peer] = address
        self._dial(address.peer)

    def forget(self, peer: PeerId) -> None:
        self._known.pop(peer, None)

    def _dial(self, peer: PeerId) -> None:
        if peer in self._known:
            self._tools.network.dial(self.address.peer, self._known[peer])

    # -- the network calls these -----------------------------------------------------------

    def linked(self, other: Endpoint) -> None:
        assert isinstance(other, ServerProcess), "servers never dial gateways"
        self.core.connected(other.hello, self._tools.clock.now)
        self.pump()

    def unlinked(self, peer: PeerId) -> None:
        self.core.disconnected(peer, self._tools.clock.now)
        self._tools.clock.after(self._rng.uniform(0.005, 0.1), self._dial, peer)
        self.pump()

    def received(self, peer: PeerId, item: Item) -> None:
        self.core.receive(peer, item, self._tools.clock.now)
        self.pump()

    # -- work ------------------------------------------------------------------------------

    def pump(self) -> None:
        effects = self.core.drain()
        for effect in effects:
            if isinstance(effect, Send):
                self._tools.network.send(self.address.peer, effect)
        if effects:
            self._deliver([each for each in effects if not isinstance(each, Send)])

    def tick(self) -> None:
        self.core.tick(self._tools.clock.now)
        self.pump()
        self._tools.clock.after(0.05, self.tick)

    def beat(self) -> None:
        for peer in self._known:
            self._tools.network.send(
                self.address.peer, Send(reply_address(peer), Lane.LIVE, Beat())
            )
        self._tools.clock.after(GATEWAY_BEAT, self.beat)
