"""One simulated world: a gateway, servers, clients, weather and faults, from one seed; and how to run it.

`simulate` is what tests and the command line call: it runs a seed and, if a promise was broken, runs it again with the
trace on and says what happened.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from support.simulator.actors.client import Client
from support.simulator.actors.gateway_process import READY, GatewayProcess
from support.simulator.actors.resuming_client import Heir
from support.simulator.actors.server_process import Cores, ServerProcess, Tools
from support.simulator.clock import Clock
from support.simulator.faults import Faults
from support.simulator.network import Network
from support.simulator.oracles import check_at_rest, check_go, check_kept, check_pages
from support.simulator.ring_coverage import Span
from support.simulator.scenario import Scenario
from support.simulator.scenarios.base import draw
from support.simulator.trace import Trace, Violation

from modelswarm_gateway.core.interface.effects import (
    CloseLink,
    Effect,
    Ejected,
    MigrationEnded,
    Refused,
    Rerouted,
)
from modelswarm_gateway.core.migration.migration import REBALANCE_CAUSE, MigrationOutcome

QUIET = 7.0  # seconds after the last session closed; grants have expired by then
MOST_EVENTS = 400_000
WATCH = 0.05
DEADLINES = ("overdue", "silent")  # causes of a reroute, or of an ejection, that nobody reported


@dataclass(slots=True)
class Outcome:
    """What one world went through."""

    sessions: int = 0
    tokens: int = 0
    rows: int = 0
    events: int = 0
    seconds: float = 0.0  # virtual
    reroutes: int = 0
    refused: int = 0
    lost: int = 0
    repeated: int = 0
    adopted: int = 0  # sessions, by another gateway
    longest_wait: float = 0.0  # of a session for its next token, after the last fault
    faults: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)  # planned ones, by how they ended
    balanced: int = 0  # of those that were moved: to even out what servers have to do
    causes: Counter[str] = field(default_factory=Counter)  # of reroutes

    def add(self, other: Outcome) -> None:
        self.sessions += other.sessions
        self.tokens += other.tokens
        self.rows += other.rows
        self.events += other.events
        self.seconds += other.seconds
        self.reroutes += other.reroutes
        self.refused += other.refused
        self.lost += other.lost
        self.repeated += other.repeated
        self.adopted += other.adopted
        self.longest_wait = max(self.longest_wait, other.longest_wait)
        self.faults.update(other.faults)
        self.causes.update(other.causes)
        self.moves.update(other.moves)
        self.balanced += other.balanced


class World:
    def __init__(self, scenario: Scenario, cores: Cores | None = None, trace: bool = False) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.trace = Trace(trace)
        self.outcome = Outcome()
        seed = f"{scenario.name}/{scenario.seed}"
        bits = random.Random(f"draw/{seed}")
        self._rng = random.Random(f"world/{seed}")
        self.network = Network(
            self.clock, random.Random(f"network/{seed}"), scenario.weather, self.trace
        )
        self._tools = Tools(
            scenario,
            self.clock,
            self.network,
            self.trace,
            cores or Cores(),
            lambda: bits.getrandbits(64),
        )
        self.clients: dict[str, Client] = {}
        self._heirs: dict[str, Heir] = {}
        self.servers: dict[str, ServerProcess] = {}
        self.gateways: dict[str, GatewayProcess] = {}
        self._late: set[str] = set()  # servers that nobody has heard of yet
        for number, span in enumerate(scenario.layout.spans):
            if scenario.layout.late and span in scenario.layout.spans[:number]:
                self._late.add(f"s{number}")
            self._boot(f"s{number}", span, 0)
        self.faults = Faults(
            self._tools,
            self.servers,
            self._boot,
            self.gateways,
            self._start_gateway,
            self._leave_gateway,
        )

    def run(self) -> Outcome:
        for number in range(self.scenario.layout.gateways):
            self._start_gateway(f"gateway{number}", number + 1)
        self.clock.after(WATCH, self._watch)
        self.faults.start()
        while not all(client.done for client in self.clients.values()):
            self._step()
        rest = max(self.clock.now, self.scenario.faults.until, self._all_awake()) + QUIET
        while self.clock.now < rest:
            self._step()
        check_at_rest(self.gateways.values(), self.servers.values())
        return self._summary()

    def _all_awake(self) -> float:
        """When no process is stopped any more, and no link holds anything back or swallows it."""
        servers = max(server.wakes_at for server in self.servers.values())
        gateways = max(gateway.wakes_at for gateway in self.gateways.values())
        held = max(self.network.hushed_until, self.network.silent_until)
        return max(held, servers, gateways)

    def _bereave(self, client: Client) -> None:
        """Its gateway is gone, or as good as gone: it has to find another one."""
        others = [g for g in self.gateways.values() if g.alive and g is not client.gateway]
        if not (self.scenario.adopts and others) or client.done:
            client.abandoned()
            return
        heir = self._heirs.setdefault(client.name, Heir(self._tools, client, self.gateways))
        heir.begin(others[0], self._rng.uniform(0.0, 0.5))

    def _leave_gateway(self, gateway: GatewayProcess) -> None:
        """It stands still: sooner or later each of its clients goes elsewhere, or waits for it to go on."""
        asleep = gateway.wakes_at - self.clock.now
        for client in self.clients.values():
            if client.gateway is gateway:
                self.clock.after(self._rng.uniform(0.0, 2 * asleep), self._leave, client, gateway)

    def _leave(self, client: Client, gateway: GatewayProcess) -> None:
        if client.gateway is gateway and gateway.wakes_at > self.clock.now:
            self._bereave(client)
            heir = self._heirs.get(client.name)
            if heir is not None:
                heir.look_back(gateway)

    def _start_gateway(self, name: str, incarnation: int) -> None:
        """A gateway, perhaps in the place of one that died with its sessions; it finds the servers and its clients."""
        if name in self.gateways:
            for client in self.clients.values():
                if client.gateway is self.gateways[name]:
                    self._bereave(client)
        gateway = GatewayProcess(self._tools, self._deliver, name, incarnation)
        self.gateways[name] = gateway
        self.network.join(gateway)
        gateway.tick()
        for server in self.servers.values():
            if server.name not in self._late:
                gateway.later(self._rng.uniform(0.0, READY), gateway.learn, server.address)
        load = self.scenario.load
        for number in range(len(self.clients), len(self.clients) + load.sessions):
            client = Client(self._tools, gateway, f"c{number}")
            self.clients[client.name] = client
            gateway.later(self._rng.uniform(0.01, load.spread), client.start)

    def _step(self) -> None:
        self.clock.step()
        if self.clock.events > MOST_EVENTS:
            raise Violation(f"{MOST_EVENTS} events and no end: the swarm runs in circles")

    def _summary(self) -> Outcome:
        out = self.outcome
        out.sessions = len(self.clients)
        out.tokens = sum(client.tokens for client in self.clients.values())
        out.rows += sum(server.rows for server in self.servers.values())
        out.events, out.seconds = self.clock.events, self.clock.now
        out.lost, out.repeated = self.network.lost, self.network.repeated
        out.adopted = sum(heir.adopted for heir in self._heirs.values())
        out.faults = self.faults.struck
        return out

    def _boot(self, name: str, span: Span, boot: int) -> None:
        server = ServerProcess(self._tools, name, span, boot, check_go)
        if name in self.servers:
            self.outcome.rows += self.servers[name].rows
            self.trace.note(self.clock.now, name, "restarts", f"as boot {boot}")
        self.servers[name] = server
        self.network.join(server)
        server.tick()
        late = self.scenario.layout.late if name in self._late else 0.0
        self.clock.after(late + self._rng.uniform(0.0, 0.01), self._announce, server)

    def _announce(self, server: ServerProcess) -> None:
        self._late.discard(server.name)
        for gateway in self.gateways.values():
            gateway.later(0.0, gateway.learn, server.address)

    def _deliver(self, gateway: GatewayProcess, effects: list[Effect]) -> None:
        """Give each client its effects, as the gateway's doors would."""
        by_session: dict[str, list[Effect]] = {}
        for effect in effects:
            self._see(gateway, effect)
            if not isinstance(effect, Ejected | CloseLink):
                by_session.setdefault(getattr(effect, "session", ""), []).append(effect)
        for session, each in by_session.items():
            client = self.clients[session]
            if client.gateway is not gateway:
                continue  # said to a client that has left
            heir = self._heirs.get(session)
            looked = heir is not None and heir.looking
            if heir is not None:
                for effect in each:
                    heir.sees(effect)
            if not looked:  # a turn that it had left, and came back to, is read by nobody
                client.sees(each)

    def _see(self, gateway: GatewayProcess, effect: Effect) -> None:
        """What oracles and the outcome have to know of it."""
        if self.trace.enabled:
            self.trace.note(self.clock.now, gateway.name, "=>", effect)
        match effect:
            case Rerouted():
                self.outcome.reroutes += 1
                self._check_cause(effect)
            case Ejected():
                self._check_ejection(gateway, effect)
            case Refused():
                self.outcome.refused += 1
            case MigrationEnded():
                self.outcome.moves[effect.outcome] += 1
                balanced = (
                    effect.cause == REBALANCE_CAUSE
                    and effect.outcome == MigrationOutcome.MIGRATED.value
                )
                self.outcome.balanced += balanced

    def _check_cause(self, effect: Rerouted) -> None:
        """The second oracle: what everybody is told of needs no deadline."""
        self.outcome.causes[effect.cause] += 1
        if self.scenario.planned:
            raise Violation(f"a planned move was noticed: {effect}", effect.session)
        if effect.cause in DEADLINES and not self.scenario.silent_faults:
            raise Violation(f"only a deadline helped: {effect}", effect.session)
        load = self.scenario.load
        if load.poisoned and not load.poisons(effect.session):
            raise Violation(f"another one's failure was noticed: {effect}", effect.session)

    def _check_ejection(self, gateway: GatewayProcess, effect: Ejected) -> None:
        """... nor does an answer to a Fence: who goes around a hop that owes one only hides that it was lost."""
        if effect.cause in DEADLINES and not self.scenario.silent_faults:
            raise Violation(f"only a deadline helped: {gateway.name} did without {effect}")

    def _watch(self) -> None:
        """With every server back, no session may stand still."""
        now = self.clock.now
        for server in self.servers.values():
            if server.alive:
                check_pages(server)
                check_kept(server)
        for client in self.clients.values():
            if client.turn is not None:
                waited = now - max(client.progress_at, self.faults.over)
                self.outcome.longest_wait = max(self.outcome.longest_wait, waited)
                if waited > self.scenario.patience:
                    raise Violation(f"{client.name} has waited {waited:.1f} s", client.name)
        self.clock.after(WATCH, self._watch)


def simulate(seed: int, name: str = "mixed", cores: Cores | None = None) -> Outcome:
    """Run a seed. A broken promise is told with the last events of the session that saw it."""
    scenario = draw(seed, name)
    try:
        return World(scenario, cores).run()
    except Exception as error:
        raise Violation(explain(scenario, cores, error)) from error


def explain(scenario: Scenario, cores: Cores | None, error: Exception, last: int = 60) -> str:
    """The story of a failing seed: run once more, with the trace on."""
    world = World(scenario, cores, trace=True)
    session = ""
    try:
        world.run()
        story = ["(the second run did not fail: the world is not deterministic)"]
    except Exception as again:
        session = again.session if isinstance(again, Violation) else ""
        story = world.trace.lines(session, last)
    head = f"seed {scenario.seed} of scenario {scenario.name}, at {world.clock.now:.5f} s"
    replay = (
        f"PYTHONPATH=tests python -m support.simulator --scenario {scenario.name} "
        f"--seed {scenario.seed} --trace"
    )
    return "\n".join([f"{type(error).__name__}: {error}", head, replay, *story])
