"""A client of a lost gateway continues at another one, which takes over the session or opens a new one (R20, takeover).

Does what the API of a gateway does for a named session: find it, wait for the lease, fetch the log, take it over.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.simulator.actors.broken_stream import LeftTurn
from support.simulator.actors.client import Client
from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.server_process import MODEL, Tools
from support.simulator.oracles import generates_nothing
from support.simulator.trace import Violation

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.input_log import common_prefix_length
from modelswarm_gateway.core.interface.effects import Effect, OwnershipLost
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn
from modelswarm_gateway.core.sessions.epoch_counters import lowest_epoch
from modelswarm_gateway.core.sessions.session import SessionState
from modelswarm_gateway.generation.session_locator import UNREACHED_SECONDS

RETRY_SECONDS = 0.1
PARKED, HELD = SessionState.PARKED.value, SessionState.HELD.value
# Seconds in which a resumed gateway must learn of the sessions that it has lost.
RELINQUISH_SECONDS = 0.5
# The same if links break and messages are late meanwhile.
RELINQUISH_SECONDS_WITH_FAULTS = 3.0
# Chance that a takeover happens just when the stalled gateway resumes ...
COINCIDENCE_CHANCE = 0.8
# ... within so many latencies.
COINCIDENCE_LATENCIES = 2.0


class ResumingClient:
    """One client that moves to another gateway."""

    def __init__(self, tools: Tools, client: Client, gateways: dict[str, GatewayProcess]) -> None:
        self._tools = tools
        self._client = client
        self._gateways = gateways
        self._where: SessionLocation | None = None
        self._round = 0  # raised by every move and its end: timers of older rounds are void
        self.looking = False
        # The log that the client had received when it lost its gateway.
        self._received: list[int] = []
        self._left: LeftTurn | None = None  # that it may resume
        self._only_read: tuple[int, ...] = ()  # log of a turn that generates nothing
        self._lost_at = 0.0
        self._ask_until = 0.0  # until then servers that did not answer are asked again
        # It continued without servers that did not answer: there may be two sessions of its name (R20, takeover).
        self._skipped_servers = False
        self.rival_prompts: list[list[int]] = []  # of turns of other requests for the session
        self.taken_over = 0
        # "heir" is a part of the seed, like the names of scenarios.
        self._rng = random.Random(f"heir/{tools.scenario.seed}/{client.name}")
        self._stalled: GatewayProcess | None = None  # the gateway that the client came from

    def start(self, gateway: GatewayProcess, delay: float) -> None:
        """Move the client to this gateway."""
        if not self.looking:
            self._received = (
                self._client.received_log() if self._has_tail(self._client.gateway) else []
            )
            self._left = self._client.left_turn()
            self._only_read = self._client.read_log()
            self._lost_at = self._tools.clock.now
            for each in self._gateways.values():  # hops of an isolated owner may have been freed
                if self._client.token_at < each.isolated_until:
                    self._lost_at = min(self._lost_at, each.isolated_since)
        self._client.move_to(gateway)
        self._round += 1
        self.looking, self._where = True, None
        self._ask_until = self._tools.clock.now + delay + UNREACHED_SECONDS
        self._look_later(delay)

    def watch_stalled(self, stalled: GatewayProcess) -> None:
        """Check the stalled gateway some time after it resumes; a parked session is closed there."""
        self._stalled = stalled
        delay = max(0.0, _returns_at(stalled) - self._tools.clock.now) + self._relinquish_seconds
        self._tools.clock.after(delay, self._check_stalled, stalled, self.taken_over)

    def _check_stalled(self, gateway: GatewayProcess, taken_over: int) -> None:
        name = self._client.name
        kept = gateway.core.find_view(name)
        if kept is None or not gateway.alive or self._client.gateway is gateway:
            return
        # It waits for links and runs nothing. After a close by the client there is nothing to wait for.
        is_held = kept.state == HELD and not self._client.done
        # Until then the client's gateway may not know either that it lost the session.
        knows_at = _returns_at(self._client.gateway) + self._relinquish_seconds
        now = self._tools.clock.now
        if now < _returns_at(gateway) or is_held:
            self.watch_stalled(gateway)
        elif now < knows_at:
            self._tools.clock.after(knows_at - now, self._check_stalled, gateway, taken_over)
        elif (
            kept.state != PARKED
            and self.taken_over > taken_over
            and self._has(self._client.gateway)
        ):
            raise Violation(
                f"{gateway.name} resumed and serves a session that another gateway has", name
            )
        else:
            self._received = []  # the close is the client's own
            gateway.later(0.0, self._close, gateway)

    @property
    def _relinquish_seconds(self) -> float:
        return RELINQUISH_SECONDS if self._has_calm_links else RELINQUISH_SECONDS_WITH_FAULTS

    def _has(self, gateway: GatewayProcess) -> bool:
        return gateway.core.find_view(self._client.name) is not None

    def _has_tail(self, gateway: GatewayProcess) -> bool:
        """True if the session has a hop for the last block.

        A parked session has none after a migration (R13, migration): its next turn brings the whole log.
        """
        view = gateway.core.find_view(self._client.name)
        blocks = self._client.rows.blocks
        last = self._tools.scenario.layout.n_blocks if blocks is None else blocks.last
        return view is None or view.state != PARKED or any(h.last == last for h in view.route)

    def _end(self) -> None:
        self._round += 1
        self.looking, self._received = False, []
        self._client.schedule_next_turn()

    def _look(self, number: int) -> None:
        client, now = self._client, self._tools.clock.now
        if client.done or number != self._round:
            return
        gateway = client.gateway
        if self._has(gateway) and not self._is_unreachable(gateway):  # it was here before
            self._continue_kept(gateway)
        elif now < gateway.discovered_at:
            self._look_later(gateway.discovered_at - now)
        else:
            gateway.core.find_session(
                client.name, MODEL, now, gateway.disconnected_servers(), claims=True
            )
            gateway.pump()

    def on_effect(self, effect: Effect) -> None:
        if isinstance(effect, OwnershipLost):
            self.start(self._client.gateway, RETRY_SECONDS)
        elif self.looking and isinstance(effect, SessionLocation):
            self._found(effect)
        elif self.looking and isinstance(effect, FetchedLog):
            self._fetched(effect)

    def _found(self, where: SessionLocation) -> None:
        client, now = self._client, self._tools.clock.now
        kept = client.gateway.core.find_view(client.name)
        is_answered = not where.unanswered
        if kept is not None and not where.is_owner_alive and is_answered:
            if where.last_started <= kept.newest_run_epoch:
                self._continue_kept(client.gateway)
                return
            client.gateway.core.close_session(client.name, now)  # it ran elsewhere since
        if where.is_owner_alive:
            if self._tools.scenario.forwards_requests:
                self._forward(where.owner)
            else:
                self._close_at_owner(where.owner)
            self._look_later(RETRY_SECONDS)
        elif (where.claimant and not self._tools.scenario.has_rivals) or (
            where.unanswered and (now < self._ask_until or kept is not None)
        ):
            self._look_later(RETRY_SECONDS)
        elif where.takeover_wait > 0:
            self._look_later(where.takeover_wait + 0.01)
        elif where.log_holders:
            self._where = where
            self._skipped_servers |= bool(where.unanswered)
            client.gateway.core.fetch_log(client.name, where.log_holders[0], now)
        else:
            self._skipped_servers |= bool(where.unanswered)
            # A turn that shares no prefix with the received log has truncated all of it.
            has_common = self._received[:1] == client.log[:1]
            has_common &= all(cut[:1] == client.log[:1] for cut in self.rival_prompts)
            self._expect(
                not (self._received and has_common),
                "nothing is left of the log that the client has received",
            )
            above = lowest_epoch(where.epoch.counter, now)
            client.gateway.core.open_session(client.name, MODEL, now, above)
            client.forget_received_log()
            self._end()

    def _fetched(self, log: FetchedLog) -> None:
        client = self._client
        if log.turn is None or not log.tokens or self._where is None:
            self._look_later(RETRY_SECONDS)
            return
        self._check_log(log.tokens, "is left")
        end = len(self._only_read)
        is_longer = 0 < end < len(log.tokens) and log.tokens[:end] == self._only_read
        if is_longer and generates_nothing(log.turn, end):
            raise Violation(f"{client.name}: a turn without tokens has left one", client.name)
        client.gateway.later(self._takeover_delay(), self._take_over, self._where, log, self._round)

    def _is_unreachable(self, gateway: GatewayProcess) -> bool:
        """True if a session that the gateway keeps is on no server that it reaches: it asks before it goes on."""
        view = gateway.core.find_view(self._client.name)
        return view is not None and not view.is_reachable

    def _continue_kept(self, gateway: GatewayProcess) -> None:
        """Go on with the session that the gateway has."""
        kept = gateway.core.parked_turn(self._client.name)
        if self._tools.scenario.forwards_requests:
            self._check_log(() if kept is None else kept.tokens, f"{gateway.name} keeps")
        gateway.core.cancel_turn(self._client.name, self._tools.clock.now)
        if self._left is not None and kept is not None:
            self._client.resume(self._left, kept)
        gateway.core.raise_epoch(self._client.name, lowest_epoch(0, self._tools.clock.now))
        self._end()
        gateway.pump()

    def _check_log(self, log: Sequence[int], where: str) -> None:
        """Check that a log has all entries that the client has received, but those that a turn without a token cut."""
        client, received = self._client, self._received
        own_cut = [] if client.has_token else [client.log]
        for cut in (*own_cut, *self.rival_prompts):
            received = received[: common_prefix_length(received, cut)]
        self._expect(
            list(log[: len(received)]) == received,
            f"the log that {where} has {len(log)} entries and not those that the client has received",
        )

    def _takeover_delay(self) -> float:
        """Return a delay that lets some takeovers happen just when the stalled gateway resumes."""
        now, stalled = self._tools.clock.now, self._stalled
        if stalled is None or stalled.resumes_at <= now or self._rng.random() >= COINCIDENCE_CHANCE:
            return 0.0
        spread = COINCIDENCE_LATENCIES * self._tools.scenario.conditions.latency
        return max(0.0, stalled.resumes_at - now + self._rng.uniform(-spread, spread))

    def _take_over(self, where: SessionLocation, log: FetchedLog, number: int) -> None:
        client = self._client
        if client.done or number != self._round or self._has(client.gateway):
            return
        self.taken_over += 1
        client.gateway.core.take_over(where, MODEL, log, self._tools.clock.now)
        if self._left is not None and log.turn is not None:
            client.resume(self._left, ParkedTurn(log.tokens, log.turn))
        self._end()
        client.gateway.pump()

    def _expect(self, holds: bool, text: str) -> None:
        """Check what holds until servers may free the hops of a lost gateway, if only gateways fail."""
        scenario, clock = self._tools.scenario, self._tools.clock
        early = clock.now - self._lost_at < scenario.kept_leases * scenario.layout.lease_seconds
        if not holds and self._has_calm_links and early and not self._skipped_servers:
            raise Violation(f"{self._client.name}: {text}", self._client.name)

    @property
    def _has_calm_links(self) -> bool:
        """True if only gateways fail and no message is late."""
        scenario = self._tools.scenario
        kinds = {kind for kind, weight in scenario.faults.weights.items() if weight}
        late = scenario.conditions.spike_chance or scenario.conditions.slow_step_chance
        return not kinds & {"kill", "drop_link", "drain_request"} and not late

    def _close_at_owner(self, owner: str) -> None:
        """Close the session at the gateway that owns it, as its client would."""
        self._received = []
        for gateway in self._gateways.values():
            is_running = gateway.alive and gateway.resumes_at <= self._tools.clock.now
            if is_running and gateway.address.peer == owner:
                gateway.later(0.0, self._close, gateway)

    def _forward(self, owner: PeerId) -> None:
        """Let the owner answer, as a gateway that forwards the request does."""
        for gateway in self._gateways.values():
            if gateway.alive and gateway.address.peer == owner:
                self._client.move_to(gateway)
                self._round += 1

    def leave_turn(self, gateway: GatewayProcess, rng: random.Random) -> None:
        """Leave the turn and return at `gateway`; the former gateway learns of it soon or late."""
        client, former = self._client, self._client.gateway
        client.leave_turn(rng)
        self.start(gateway, rng.uniform(0.0, self._tools.scenario.return_seconds))
        self._left = None  # another request follows
        former.later(rng.choice((0.0, 0.3, 2.0)) * rng.random(), self._cancel_turn, former)

    def _cancel_turn(self, former: GatewayProcess) -> None:
        if self.looking or self._client.gateway is not former:
            former.cancel_turn(self._client.name)

    def _close(self, gateway: GatewayProcess) -> None:
        if gateway is not self._client.gateway:
            gateway.core.close_session(self._client.name, self._tools.clock.now)
            gateway.pump()

    def _look_later(self, seconds: float) -> None:
        self._client.gateway.later(seconds, self._look, self._round)


def _returns_at(gateway: GatewayProcess) -> float:
    """Return the time from which a stalled or isolated gateway is back."""
    return max(gateway.resumes_at, gateway.isolated_until)
