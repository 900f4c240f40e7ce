"""One simulated world: gateways, servers, clients, conditions and faults, all from one seed.

Tests and the command line call `simulate`. It runs a seed and, if an oracle finds a violation, runs it again with the
trace on and adds the last events.
"""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from dataclasses import dataclass, field

from support.simulator.actors.client import Client
from support.simulator.actors.gateway_process import DISCOVERY_SECONDS, GatewayProcess
from support.simulator.actors.resuming_client import ResumingClient
from support.simulator.actors.rival_client import RivalClient
from support.simulator.actors.server_process import Cores, ServerProcess, Tools
from support.simulator.clock import Clock
from support.simulator.faults import FaultInjector
from support.simulator.liveness import HopLeaks, Innocence, Ownership, Starvation
from support.simulator.network import Network
from support.simulator.oracles import (
    OwnLogs,
    check_at_rest,
    check_no_tokens,
    check_opaque,
    check_pages,
    check_refusal,
    check_reservations,
    check_retained,
    check_start,
)
from support.simulator.ring_coverage import Span
from support.simulator.scenario import NEVER, Scenario
from support.simulator.scenarios.base import draw
from support.simulator.trace import Trace, Violation

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.core.interface.effects import (
    CloseLink,
    Effect,
    Ejected,
    MigrationEnded,
    Refused,
    Rerouted,
)
from modelswarm_gateway.core.migration.migration import REBALANCE_CAUSE, MigrationOutcome

SETTLE_SECONDS = 7.0  # from the last close to the check for leaks; grants have expired by then
IDLE_SECONDS = 3.0  # from the last close to the end of the sessions that clients have left behind
MAX_EVENTS = 400_000
WATCH_SECONDS = 0.05  # between two checks of pages, retained rows and stalls
# Causes of a reroute or an ejection that only a deadline shows.
DEADLINE_CAUSES = ("overdue", "silent")


@dataclass(slots=True)
class Outcome:
    """Counters of one world, or of many."""

    sessions: int = 0
    tokens: int = 0
    rows: int = 0
    events: int = 0
    seconds: float = 0.0  # virtual
    reroutes: int = 0
    refused: int = 0
    lost: int = 0
    repeated: int = 0
    taken_over: int = 0  # sessions, by another gateway
    resumed: int = 0  # turns of broken streams
    returned: int = 0  # rows that clients got
    forked: int = 0  # positions that new sessions copied from their parents
    longest_wait: float = 0.0  # of a session for its next token, after the last fault
    longest_starvation: float = 0.0  # of all waiting sessions, after the last fault
    longest_ownerless: float = 0.0  # of a session whose client waits, after the last fault
    faults: Counter[str] = field(default_factory=Counter)
    migrations: Counter[str] = field(default_factory=Counter)  # by outcome
    rebalanced: int = 0  # sessions that migrated to rebalance
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
        self.taken_over += other.taken_over
        self.resumed += other.resumed
        self.returned += other.returned
        self.forked += other.forked
        self.longest_wait = max(self.longest_wait, other.longest_wait)
        self.longest_starvation = max(self.longest_starvation, other.longest_starvation)
        self.longest_ownerless = max(self.longest_ownerless, other.longest_ownerless)
        self.faults.update(other.faults)
        self.causes.update(other.causes)
        self.migrations.update(other.migrations)
        self.rebalanced += other.rebalanced


class World:
    def __init__(self, scenario: Scenario, cores: Cores | None = None, trace: bool = False) -> None:
        self.scenario = scenario
        self.clock = Clock()
        self.trace = Trace(trace)
        self.outcome = Outcome()
        seed = f"{scenario.name}/{scenario.seed}"
        bits = random.Random(f"draw/{seed}")
        self._rng = random.Random(f"world/{seed}")
        cores = cores or Cores()
        self.network = Network(
            self.clock,
            random.Random(f"network/{seed}"),
            scenario.conditions,
            self.trace,
            cores.codec if scenario.encodes_messages else None,
        )
        self._tools = Tools(
            scenario,
            self.clock,
            self.network,
            self.trace,
            cores,
            lambda: bits.getrandbits(64),
        )
        self.clients: dict[str, Client] = {}
        self._resuming: dict[str, ResumingClient] = {}
        self._rivals: dict[tuple[str, PeerId], RivalClient] = {}  # by session and gateway
        self._own_logs = OwnLogs(scenario)
        self.servers: dict[str, ServerProcess] = {}
        self.gateways: dict[str, GatewayProcess] = {}
        self._ownership = Ownership(scenario, self.clients, self.gateways)
        self._hop_leaks = HopLeaks(scenario, self.servers, self.gateways, self.network.disturbances)
        self._starvation = Starvation(scenario, self.clients)
        self._innocence = Innocence(scenario, self.network.disturbances)
        self._left_until = (
            0.0  # the last time at which a server kept hops for a client that is gone
        )
        self._unannounced: set[str] = set()  # servers that no gateway knows yet
        for number, span in enumerate(scenario.layout.spans):
            if scenario.layout.announce_seconds and span in scenario.layout.spans[:number]:
                self._unannounced.add(f"s{number}")
            self._boot(f"s{number}", span, 0)
        self.faults = FaultInjector(
            self._tools,
            self.servers,
            self._boot,
            self.gateways,
            self._start_gateway,
            self._leave_gateway,
            self._leave_stopped_gateway,
            self._leave_turn,
        )

    def run(self) -> Outcome:
        for number in range(self.scenario.layout.gateways):
            self._start_gateway(f"gateway{number}", number + 1)
        self.clock.after(WATCH_SECONDS, self._watch)
        self.faults.start()
        done_at = self._run_clients()
        while self.clock.now < self._rest_after(done_at):  # later if a process is stopped meanwhile
            self._step()
            if not self._are_clients_done():  # those of a gateway that has started meanwhile
                done_at = self._run_clients()
        check_at_rest(self.gateways.values(), self.servers.values())
        return self._summary()

    def _are_clients_done(self) -> bool:
        return all(client.done for client in self.clients.values())

    def _run_clients(self) -> float:
        """Run until all clients are done. Return the time."""
        while not self._are_clients_done():
            self._step()
        if self.scenario.forwards_requests:
            self.clock.after(IDLE_SECONDS, self._close_idle_sessions)
        return self.clock.now

    def _rest_after(self, done_at: float) -> float:
        """Return the time at which no process may hold anything."""
        lease = self.scenario.layout.lease_seconds
        settle = max(SETTLE_SECONDS, 2 * lease + 1.0 if lease < NEVER else 0.0)
        return settle + max(done_at, self.scenario.faults.until, self._last_disturbance_end())

    def _close_idle_sessions(self) -> None:
        """Close the parked sessions that gateways keep, as after their idle time."""
        for gateway in self.gateways.values():
            in_turn = {view.session for view in gateway.views_in_turn()}
            for session in [name for name in gateway.core._sessions if name not in in_turn]:
                gateway.core.close_session(session, self.clock.now)
            gateway.pump()

    def _last_disturbance_end(self) -> float:
        """Return the time from which no process is stopped and no link delays or loses a direction."""
        servers = max(server.resumes_at for server in self.servers.values())
        gateways = max(
            max(gateway.resumes_at, gateway.isolated_until) for gateway in self.gateways.values()
        )
        held = max(self.network.delayed_until, self.network.one_way_until)
        return max(held, servers, gateways)

    def _has_left_hops(self) -> bool:
        """True if a server keeps hops of a lost gateway for a client that is gone: until their lease ends (R19).

        Their pages may be the room that others wait for, so the bound of that begins when they are freed. Hops that
        were never started are no excuse: their grant ends much earlier (R12, admission).
        """
        done = {client.name for client in self.clients.values() if client.done}
        hops = (hop for server in self.servers.values() for hop in server.core._fencing.hops)
        return any(hop.was_started and hop.session in done for hop in hops)

    def _move_client(self, client: Client) -> None:
        """Let the client continue at another gateway, if the scenario has takeovers; else it ends."""
        others = [g for g in self.gateways.values() if g.alive and g is not client.gateway]
        if not (self.scenario.can_take_over and others) or client.done:
            client.abandon()
            return
        resuming = self._resuming_client(client)
        resuming.start(others[0], self._rng.uniform(0.0, self.scenario.return_seconds))
        self._start_rival(client)

    def _start_rival(self, client: Client) -> None:
        """Let other requests of the session come to all gateways but the one that its client moved to."""
        others = [g for g in self.gateways.values() if g.alive and g is not client.gateway]
        for gateway in others if self.scenario.has_rivals and not client.done else ():
            resuming = self._resuming[client.name]
            rival = RivalClient(self._tools, client, resuming, gateway)
            self._rivals[client.name, gateway.address.peer] = rival
            rival.start(self._rng.uniform(0.0, 0.5))

    def _leave_gateway(self, gateway: GatewayProcess) -> None:
        """The gateway has ended: its clients go elsewhere."""
        for client in self.clients.values():
            if client.gateway is gateway:
                self._move_client(client)

    def _leave_stopped_gateway(self, gateway: GatewayProcess) -> None:
        """The gateway is stopped or cut off: its clients go elsewhere at some time, unless it is back before."""
        is_isolated = gateway.isolated_until > self.clock.now
        soon = self.scenario.layout.lease_seconds / 2 if is_isolated else math.inf
        latest = min(soon, 2 * self._remaining_absence(gateway))
        for client in self.clients.values():
            if client.gateway is gateway:
                self.clock.after(self._rng.uniform(0.0, latest), self._leave, client, gateway)

    def _leave_turn(self, rng: random.Random) -> bool:
        """Let a client leave its turn and return, mostly at another gateway. Return False if there is none."""
        now = self.clock.now
        running = [g for g in self.gateways.values() if g.alive and g.resumes_at <= now]
        busy = [
            client
            for client in self.clients.values()
            if client.turn is not None and client.gateway in running
        ]
        if not busy:
            return False
        client = rng.choice(busy)
        self.trace.note(now, client.name, "leaves", client.gateway.name)
        self._resuming_client(client).leave_turn(rng.choice(running), rng)
        return True

    def _resuming_client(self, client: Client) -> ResumingClient:
        return self._resuming.setdefault(
            client.name, ResumingClient(self._tools, client, self.gateways)
        )

    def _remaining_absence(self, gateway: GatewayProcess) -> float:
        return max(gateway.resumes_at, gateway.isolated_until) - self.clock.now

    def _leave(self, client: Client, gateway: GatewayProcess) -> None:
        if client.gateway is gateway and self._remaining_absence(gateway) > 0:
            self._move_client(client)
            resuming = self._resuming.get(client.name)
            if resuming is not None:
                resuming.watch_stalled(gateway)
            if gateway.isolated_until > self.clock.now and self._rng.random() < 0.5:
                gateway.later(0.0, gateway.cancel_turn, client.name)

    def _start_gateway(self, name: str, incarnation: int) -> None:
        """Start a gateway, perhaps in place of a killed one, with new clients; it discovers the servers."""
        old = self.gateways.get(name)
        if old is not None:
            self._leave_gateway(old)
        gateway = GatewayProcess(self._tools, self._deliver, name, incarnation)
        if old is not None:  # the network parts the name, whatever process has it
            gateway.isolated_since = old.isolated_since
            gateway.isolated_until = old.isolated_until
        if old is not None and self.scenario.has_supervisor:
            gateway.replaces = (*old.replaces, old.address.peer)
        self.gateways[name] = gateway
        self.network.join(gateway)
        gateway.tick()
        for server in self.servers.values():
            if server.name not in self._unannounced:
                delay = self._rng.uniform(0.0, DISCOVERY_SECONDS)
                if (
                    server.alive
                ):  # a dial of a server that has ended is refused: it is not waited for
                    gateway.later(delay, gateway.learn, server.address)
        load = self.scenario.load
        last = min(load.max_sessions, len(self.clients) + load.sessions)
        for number in range(len(self.clients), last):
            client = Client(self._tools, gateway, f"c{number}")
            self.clients[client.name] = client
            gateway.later(self._rng.uniform(0.01, load.start_seconds), client.start)

    def _step(self) -> None:
        self.clock.step()
        if self.clock.events > MAX_EVENTS:
            raise Violation(f"{MAX_EVENTS} events and no end: sessions are rerouted for ever")

    def _summary(self) -> Outcome:
        out = self.outcome
        out.sessions = len(self.clients)
        out.tokens = sum(client.tokens for client in self.clients.values())
        out.resumed = sum(client.resumed for client in self.clients.values())
        out.returned = sum(client.returned for client in self.clients.values())
        out.rows += sum(server.rows for server in self.servers.values())
        out.forked += sum(server.forked for server in self.servers.values())
        out.events, out.seconds = self.clock.events, self.clock.now
        out.lost, out.repeated = self.network.lost, self.network.repeated
        out.taken_over = sum(each.taken_over for each in self._resuming.values())
        out.faults = self.faults.counts
        out.longest_starvation = self._starvation.longest
        out.longest_ownerless = self._ownership.longest_ownerless
        return out

    def _boot(self, name: str, span: Span, boot: int) -> None:
        server = ServerProcess(self._tools, name, span, boot, check_start)
        if name in self.servers:
            self.outcome.rows += self.servers[name].rows
            self.outcome.forked += self.servers[name].forked
            self.trace.note(self.clock.now, name, "restarts", f"as boot {boot}")
        self.servers[name] = server
        self.network.join(server)
        server.tick()
        delay = self.scenario.layout.announce_seconds if name in self._unannounced else 0.0
        self.clock.after(delay + self._rng.uniform(0.0, 0.01), self._announce, server)

    def _announce(self, server: ServerProcess) -> None:
        self._unannounced.discard(server.name)
        for gateway in self.gateways.values():
            gateway.later(0.0, gateway.learn, server.address)

    def _deliver(self, gateway: GatewayProcess, effects: list[Effect]) -> None:
        """Give each client its effects, as the gateway's API would."""
        by_session: dict[str, list[Effect]] = {}
        for effect in effects:
            self._observe(gateway, effect)
            if not isinstance(effect, Ejected | CloseLink):
                by_session.setdefault(getattr(effect, "session", ""), []).append(effect)
        for session, each in by_session.items():
            client = self.clients[session]
            self._own_logs.check(gateway, each)
            if client.gateway is not gateway:  # the client has moved to another gateway
                rival = self._rivals.get((session, gateway.address.peer))
                if rival is not None:
                    rival.on_effects(each)
                continue
            resuming = self._resuming.get(session)
            is_looking = resuming is not None and resuming.looking
            if resuming is not None:
                for effect in each:
                    resuming.on_effect(effect)
            if not is_looking:  # a client that came back ignores the turn that it had left
                client.on_effects(each)
                self._start_forks(client)

    def _start_forks(self, parent: Client) -> None:
        """Start a client for each session that was forked, soon: its parent may be anywhere by then."""
        for request in parent.take_forks():
            if len(self.clients) < self.scenario.load.max_sessions:
                client = Client(self._tools, parent.gateway, f"c{len(self.clients)}")
                self.clients[client.name] = client
                delay = self._rng.choice((0.0, 0.0, 0.002, 0.05))
                parent.gateway.later(delay, client.start, request)

    def _observe(self, gateway: GatewayProcess, effect: Effect) -> None:
        """Count the effect and check its cause."""
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
                if not self.scenario.has_silent_faults:
                    check_refusal(gateway, effect, self.servers.values())
            case MigrationEnded():
                self.outcome.migrations[effect.outcome] += 1
                rebalanced = (
                    effect.cause == REBALANCE_CAUSE
                    and effect.outcome == MigrationOutcome.MIGRATED.value
                )
                self.outcome.rebalanced += rebalanced

    def _check_cause(self, effect: Rerouted) -> None:
        """Check that no reported fault needs a deadline, and that drains and other sessions' failures go unnoticed."""
        self.outcome.causes[effect.cause] += 1
        if self.scenario.has_only_drains:
            raise Violation(f"a drain rerouted a session: {effect}", effect.session)
        if effect.cause in DEADLINE_CAUSES and not self.scenario.has_silent_faults:
            raise Violation(f"only a deadline ended it: {effect}", effect.session)
        load = self.scenario.load
        if load.poisoned and not load.is_poisoned(effect.session):
            raise Violation(f"another session's failure rerouted it: {effect}", effect.session)

    def _check_ejection(self, gateway: GatewayProcess, effect: Ejected) -> None:
        """Check that no hop was avoided for a missing FenceAck: that would hide a lost message."""
        if effect.cause in DEADLINE_CAUSES and not self.scenario.has_silent_faults:
            raise Violation(f"only a deadline ended it: {gateway.name} got {effect}")
        self._innocence.check(gateway, effect.peer, effect.cause, self.clock.now)

    def _watch(self) -> None:
        """Check pages and retained rows, and that no session waits too long after the last fault."""
        now = self.clock.now
        for server in self.servers.values():
            if server.alive:
                check_pages(server)
                check_retained(server)
        if self.scenario.load.sends_rows:
            check_opaque(self.gateways.values(), self.servers.values())
            logs = {client.name: client.read_log() for client in self.clients.values()}
            check_no_tokens(logs, self.servers.values())
        clients = self.clients.values()
        if self.scenario.load.reserves:
            lengths = {
                each.name: each.reservation.max_length for each in clients if each.reservation
            }
            check_reservations(lengths, self.servers.values())
        for client in clients:
            if client.turn is not None:
                waited = now - max(client.progress_at, self.faults.ends_at)
                self.outcome.longest_wait = max(self.outcome.longest_wait, waited)
                if waited > self.scenario.max_wait_seconds:
                    raise Violation(f"{client.name} has waited {waited:.1f} s", client.name)
        self._check_liveness(now)
        self.clock.after(WATCH_SECONDS, self._watch)

    def _check_liveness(self, now: float) -> None:
        calm_since = max(self.faults.ends_at, self._last_disturbance_end())
        if self.scenario.can_take_over:
            self._ownership.check(now, calm_since)
        self._hop_leaks.check(now)
        if self._has_left_hops():
            self._left_until = now
        self._starvation.check(now, max(calm_since, self._left_until))
        for gateway in self.gateways.values():
            self._innocence.check_suspects(gateway, now)


def simulate(seed: int, name: str = "mixed", cores: Cores | None = None) -> Outcome:
    """Run a seed. A violation is raised with the last events of its session."""
    scenario = draw(seed, name)
    try:
        return World(scenario, cores).run()
    except Exception as error:
        raise Violation(explain_violation(scenario, cores, error)) from error


@functools.cache
def simulate_once(seed: int, name: str) -> Outcome:
    """Return the outcome of a seed without planted bugs, which is always the same. Do not change it."""
    return simulate(seed, name)


def explain_violation(
    scenario: Scenario, cores: Cores | None, error: Exception, last: int = 60
) -> str:
    """Run a failing seed again with the trace on; return the error, the replay command and the last events."""
    world = World(scenario, cores, trace=True)
    session = ""
    try:
        world.run()
        events = ["(the second run did not fail: the world is not deterministic)"]
    except Exception as again:
        session = again.session if isinstance(again, Violation) else ""
        events = world.trace.lines(session, last)
    head = f"seed {scenario.seed} of scenario {scenario.name}, at {world.clock.now:.5f} s"
    replay = (
        f"PYTHONPATH=tests python -m support.simulator --scenario {scenario.name} "
        f"--seed {scenario.seed} --trace"
    )
    return "\n".join([f"{type(error).__name__}: {error}", head, replay, *events])
