"""A client whose gateway is gone goes on at another one, which adopts its session or opens it anew (R20).

Does what the doors of a gateway do for a named session: ask where it is, wait for the lease, fetch the log, adopt.
"""

from __future__ import annotations

import random

from support.simulator.actors.client import Client
from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.server_process import MODEL, Tools
from support.simulator.trace import Violation

from modelswarm_gateway.core.interface.effects import Effect, OwnershipLost
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.sessions.session import SessionState
from modelswarm_gateway.generation.session_locator import UNREACHED_SECONDS

PAUSE = 0.1
PARKED = SessionState.PARKED.value
AWAKE = 0.5  # seconds until a gateway that woke has found out what is not its own any more ...
TROUBLED = 3.0  # ... if links break and messages are late meanwhile
MEETS = 0.8  # chance that a client's new gateway takes its session over just when the old one wakes
REACH = 2.0  # latencies: so near


class Heir:
    """One client on its way to another gateway."""

    def __init__(self, tools: Tools, client: Client, gateways: dict[str, GatewayProcess]) -> None:
        self._tools = tools
        self._client = client
        self._gateways = gateways
        self._where: SessionLocation | None = None
        self._round = 0  # raised by every loss and by what ends it: timers of older ones are void
        self.looking = False
        self._told: list[
            int
        ] = []  # what the client has read, some of it of the turn that broke off
        self._since = 0.0
        self._sure = 0.0  # until then who was not heard is asked again
        self._blind = False  # it went on once without them: there may be two of its name (R20)
        self.adopted = 0
        self._rng = random.Random(f"heir/{tools.scenario.seed}/{client.name}")
        self._asleep: GatewayProcess | None = None  # the gateway that the client came from

    def begin(self, gateway: GatewayProcess, delay: float) -> None:
        """The client goes to this gateway."""
        if not self.looking:
            self._told = self._client.told() if self._has_tail(self._client.gateway) else []
            self._since = self._tools.clock.now
        self._client.orphaned(gateway)
        self._round += 1
        self.looking, self._where = True, None
        self._sure = self._tools.clock.now + delay + UNREACHED_SECONDS
        self._again(delay)

    def look_back(self, asleep: GatewayProcess) -> None:
        """When it has been awake for a while. What rests there is swept, as by every gateway."""
        self._asleep = asleep
        delay = max(0.0, asleep.wakes_at - self._tools.clock.now)
        delay += AWAKE if self._calm else TROUBLED
        self._tools.clock.after(delay, self._sweep, asleep, self.adopted)

    def _sweep(self, gateway: GatewayProcess, adopted: int) -> None:
        name = self._client.name
        kept = gateway.core.find_view(name)
        if kept is None or not gateway.alive or self._client.gateway is gateway:
            return
        if self._tools.clock.now < gateway.wakes_at:
            self.look_back(gateway)
        elif kept.state != PARKED and self.adopted > adopted and self._has(self._client.gateway):
            raise Violation(f"{gateway.name} woke and goes on with what another one has", name)
        else:
            self._told = []  # where it was is told to close it
            gateway.later(0.0, self._close, gateway)

    def _has(self, gateway: GatewayProcess) -> bool:
        return gateway.core.find_view(self._client.name) is not None

    def _has_tail(self, gateway: GatewayProcess) -> bool:
        """A session that rests has none when that server was left (R13): its next turn brings all that it needs."""
        view = gateway.core.find_view(self._client.name)
        blocks = self._tools.scenario.layout.n_blocks
        return view is None or view.state != PARKED or any(h.last == blocks for h in view.route)

    def _end(self) -> None:
        self._round += 1
        self.looking, self._told = False, []
        self._client.go_on()

    def _look(self, number: int) -> None:
        client, now = self._client, self._tools.clock.now
        if client.done or number != self._round:
            return
        gateway = client.gateway
        if self._has(gateway):  # it was here before
            gateway.core.cancel_turn(client.name, now)
            self._end()
            gateway.pump()
        elif now < gateway.ready_at:
            self._again(gateway.ready_at - now)
        else:
            gateway.core.find_session(client.name, MODEL, now, gateway.cut_off(), claims=True)
            gateway.pump()

    def sees(self, effect: Effect) -> None:
        if isinstance(effect, OwnershipLost):
            self.begin(self._client.gateway, PAUSE)
        elif self.looking and isinstance(effect, SessionLocation):
            self._found(effect)
        elif self.looking and isinstance(effect, FetchedLog):
            self._fetched(effect)

    def _found(self, where: SessionLocation) -> None:
        client, now = self._client, self._tools.clock.now
        if where.is_owner_alive:
            self._let_go(where.owner)
            self._again(PAUSE)
        elif where.claimant or (where.unanswered and now < self._sure):
            self._again(PAUSE)
        elif where.takeover_wait > 0:
            self._again(where.takeover_wait + 0.01)
        elif where.log_holders:
            self._where = where
            self._blind |= bool(where.unanswered)
            client.gateway.core.fetch_log(client.name, where.log_holders[0], now)
        else:
            self._blind |= bool(where.unanswered)
            # a turn that shares nothing with what was read has had all of it cut
            kept = self._told[:1] == client.log[:1]
            self._expect(not (self._told and kept), "nothing is left of what the client has read")
            client.gateway.core.open_session(client.name, MODEL, now, above=where.epoch.counter)
            self._end()

    def _fetched(self, log: FetchedLog) -> None:
        client = self._client
        if log.turn is None or not log.tokens or self._where is None:
            self._again(PAUSE)
            return
        left, asks = (
            list(log.tokens),
            client.log,
        )  # of its next turn, as far as that came, or further
        asked = left[: len(asks)] == asks[: len(left)]
        self._expect(
            asked or list(log.tokens[: len(self._told)]) == self._told,
            f"the log that is left has {len(log.tokens)} entries: not what the client has read",
        )
        client.gateway.later(self._dawdle(), self._adopt, self._where, log, self._round)

    def _dawdle(self) -> float:
        """Some take a session over just when the gateway that had it wakes."""
        now, asleep = self._tools.clock.now, self._asleep
        if asleep is None or asleep.wakes_at <= now or self._rng.random() >= MEETS:
            return 0.0
        reach = REACH * self._tools.scenario.weather.latency
        return max(0.0, asleep.wakes_at - now + self._rng.uniform(-reach, reach))

    def _adopt(self, where: SessionLocation, log: FetchedLog, number: int) -> None:
        client = self._client
        if client.done or number != self._round or self._has(client.gateway):
            return
        self.adopted += 1
        client.gateway.core.take_over(where, MODEL, log, self._tools.clock.now)
        self._end()
        client.gateway.pump()

    def _expect(self, holds: bool, text: str) -> None:
        """Where nothing but gateways fails, all that was read is found, until leases have ended twice."""
        scenario, clock = self._tools.scenario, self._tools.clock
        early = clock.now - self._since < 1.5 * scenario.layout.lease_seconds
        if not holds and self._calm and early and not self._blind:
            raise Violation(f"{self._client.name}: {text}", self._client.name)

    @property
    def _calm(self) -> bool:
        """Nothing but gateways fails, and messages come in time."""
        scenario = self._tools.scenario
        struck = {kind for kind, weight in scenario.faults.weights.items() if weight}
        late = scenario.weather.spike_chance or scenario.weather.slow_step_chance
        return not struck & {"kill", "drop", "order"} and not late

    def _let_go(self, owner: str) -> None:
        """The owner lives: there it is closed, as by its client."""
        self._told = []
        for gateway in self._gateways.values():
            awake = gateway.alive and gateway.wakes_at <= self._tools.clock.now
            if awake and gateway.address.peer == owner:
                gateway.later(0.0, self._close, gateway)

    def _close(self, gateway: GatewayProcess) -> None:
        if gateway is not self._client.gateway:
            gateway.core.close_session(self._client.name, self._tools.clock.now)
            gateway.pump()

    def _again(self, seconds: float) -> None:
        self._client.gateway.later(seconds, self._look, self._round)
