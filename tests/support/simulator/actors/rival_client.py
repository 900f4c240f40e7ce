"""Another request for a client's session, at another gateway: two gateways take it over at once (R20, takeover).

Does what the API of a gateway does, but heeds no claim: a gateway that stalls between its search and its Fences does
not either. The tokens of its turn are checked against the log and the parameters of that gateway (`world.py`).
"""

from __future__ import annotations

import random

from support.simulator.actors.client import Client
from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.resuming_client import ResumingClient
from support.simulator.actors.server_process import MODEL, Tools

from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.turn import TurnRequest

MOST_LOOKS = 20


class RivalClient:
    def __init__(
        self, tools: Tools, client: Client, resuming: ResumingClient, gateway: GatewayProcess
    ) -> None:
        self._tools = tools
        self._client = client
        self._resuming = resuming
        self.gateway = gateway
        self._where: SessionLocation | None = None
        self._looks = 0
        self._rng = random.Random(f"rival/{tools.scenario.seed}/{client.name}/{gateway.name}")

    def start(self, delay: float) -> None:
        self.gateway.later(delay, self._look)

    def _has_session(self) -> bool:
        return self.gateway.alive and self.gateway.core.find_view(self._client.name) is not None

    def _look(self) -> None:
        now = self._tools.clock.now
        self._looks += 1
        is_over = self._client.done or self._has_session() or self._looks > MOST_LOOKS
        if self.gateway.alive and not is_over and self._client.gateway is not self.gateway:
            self._where = None
            self.gateway.core.find_session(self._client.name, MODEL, now)
            self.gateway.pump()

    def on_effects(self, effects: list[Effect]) -> None:
        for effect in effects:
            self._on_effect(effect)

    def _on_effect(self, effect: Effect) -> None:
        now, core = self._tools.clock.now, self.gateway.core
        if isinstance(effect, SessionLocation) and effect.takeover_wait > 0:
            pause = self._rng.choice((0.0, 0.001, 0.01, 0.1)) * self._rng.random()
            self.gateway.later(effect.takeover_wait + pause, self._look)
        elif isinstance(effect, SessionLocation) and effect.log_holders:
            self._where = effect
            core.fetch_log(self._client.name, effect.log_holders[0], now)
        elif isinstance(effect, FetchedLog) and effect.turn is not None and effect.tokens:
            pause = self._rng.choice((0.0, 0.0, 0.002, 0.02)) * self._rng.random()
            self.gateway.later(pause, self._take_over, effect)

    def _take_over(self, log: FetchedLog) -> None:
        where = self._where
        if self._client.done or self._has_session() or where is None or not self.gateway.alive:
            return
        core, rng = self.gateway.core, self._rng
        core.take_over(where, MODEL, log, self._tools.clock.now)
        self.gateway.later(rng.choice((0.0, 0.001, 0.01)) * rng.random(), self._begin, log)
        self.gateway.pump()

    def _begin(self, log: FetchedLog) -> None:
        if not self._has_session() or self._client.gateway is self.gateway:
            return
        if self._client.done:  # its client has closed the session, and asks for nothing more
            self._leave()
            return
        rng, tokens = self._rng, list(log.tokens)
        if rng.random() < 0.5:  # an edited prompt: what the client has received may be truncated
            del tokens[rng.randrange(len(tokens)) :]
            tokens += [rng.randrange(self._tools.scenario.vocab) for _ in range(rng.randint(1, 6))]
            self._resuming.rival_prompts.append(tokens)
        room = self._tools.scenario.layout.max_length - len(tokens)
        sampling = Sampling(temperature=1.0, seed=rng.getrandbits(32))
        request = TurnRequest(tuple(tokens), min(room, rng.randint(1, 20)), sampling)
        self.gateway.core.start_turn(self._client.name, request, self._tools.clock.now)
        self.gateway.later(rng.uniform(0.0, 0.3), self._leave)
        self.gateway.pump()

    def _leave(self) -> None:
        """The other request ends: it closes the session, or leaves it parked."""
        if not self._has_session() or self._client.gateway is self.gateway:
            return
        core, now = self.gateway.core, self._tools.clock.now
        if self._client.done or self._rng.random() < 0.5:
            self._resuming.rival_prompts.append([])
            core.close_session(self._client.name, now)
        else:
            core.cancel_turn(self._client.name, now)
        self.gateway.pump()
