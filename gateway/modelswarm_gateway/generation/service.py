"""Takes requests: model, prompt, defaults, limits; starts generations and knows which run.

Both doors use it; it knows the engine only as the contract in `engine.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code, gateway_stopping, model_not_found
from modelswarm_gateway.generation.generation import Generation, GenerationContext, TurnStart
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey, wire_name
from modelswarm_gateway.generation.request import GenerationRequest, encode_prompt, token_limit
from modelswarm_gateway.generation.resumption import ResumedTurn, resume_turn
from modelswarm_gateway.generation.session_locator import SessionLocator
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.models.tokenizer import ModelTokenizer
from modelswarm_gateway.settings import cap_keepalive

RELEASE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    credit_ahead: int = 32
    max_named_sessions: int = 1000  # explicit ones, at most
    idle_seconds: float = 600.0
    keepalive_seconds: float = 5.0  # silence after which a client gets a sign of life
    max_generations: int = 4096  # turns at a time, at most


class GenerationService:
    def __init__(
        self,
        backend: SessionBackend,
        metrics: Metrics,
        clock: Callable[[], float],
        settings: ServiceSettings | None = None,
    ) -> None:
        self.backend, self.metrics, self.clock = backend, metrics, clock
        self.settings = settings or ServiceSettings()
        self.named_sessions = NamedSessions(
            lambda key, above: backend.open_session(key[0], wire_name(key), above),
            backend.close_session,
            clock,
            limit=self.settings.max_named_sessions,
            idle_seconds=self.settings.idle_seconds,
        )
        self._locator = SessionLocator(backend, self.named_sessions, clock)
        self._context = GenerationContext(
            backend, self.named_sessions, metrics, clock, self._on_closed
        )
        self.accepting = True
        self.shutting_down = False  # clients are to go elsewhere; those that still come are served
        self._last_request_at = clock()
        self._running: set[Generation] = set()
        self._ended = asyncio.Event()

    def keepalive_seconds(self, model: str) -> float:
        """Silence after which a client of that model gets a sign of life."""
        hold = self.backend.hold_limit(model)
        return cap_keepalive(self.settings.keepalive_seconds, hold)

    @property
    def running_count(self) -> int:
        return len(self._running)

    def abort_all(self) -> None:
        """Every turn that still runs ends with an error that says so."""
        for generation in tuple(self._running):
            generation.abort(gateway_stopping())

    async def start_generation(self, request: GenerationRequest) -> Generation:
        """Raises ApiError, or Elsewhere. The caller must `close` what it gets, whatever happens."""
        self._last_request_at = asked_at = self.clock()
        here = (
            request.forwarded
            and request.session_id
            and self.named_sessions.has_session((request.model, request.session_id))
        )
        if not self.accepting and not here:  # nobody else can answer for a session that is here
            raise gateway_stopping()
        if len(self._running) >= self.settings.max_generations:
            detail = f"{self.settings.max_generations} requests are running already"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        card, text = self._find_model(request.model)
        tokens = await encode_prompt(request, text, card.max_length)
        turn = TurnRequest(
            tokens=tokens,
            max_tokens=token_limit(request, text),
            sampling=text.defaults.sampling(request.options, secrets.randbits(64)),
            credit_ahead=self.settings.credit_ahead,
        )
        above, resume = 0, None
        if request.session_id is not None:
            key = (request.model, request.session_id)
            if request.resume_after is not None:
                await self._abort_running(key)
            above = await self._locator.acquire(request, key)
            resume = self._find_resumed_turn(request, key, tokens)
        begin = TurnStart(turn, text, asked_at, above, resume)
        generation = Generation(self._context, request, begin)
        self._running.add(generation)
        return generation

    async def is_owned_by(self, ask: GenerationRequest, door: str) -> bool | None:
        """Whether the gateway with that door still has the session of a named request; None: the servers know of no
        gateway that has it and lives."""
        assert ask.session_id is not None
        where = await self.backend.find_session(wire_name((ask.model, ask.session_id)), ask.model)
        return door in where.target.split(",") if where.living else None

    def _find_resumed_turn(
        self, ask: GenerationRequest, key: SessionKey, prompt: tuple[int, ...]
    ) -> ResumedTurn | None:
        if ask.resume_after is None:
            return None
        if self.named_sessions.is_busy(key):
            raise self.named_sessions.busy_error(key)
        kept = (
            self.backend.kept_turn(self.named_sessions.session_name(key))
            if self.named_sessions.has_session(key)
            else None
        )
        return resume_turn(prompt, kept, ask.resume_after, ask.resume_mark)

    async def _abort_running(self, key: SessionKey) -> None:
        """Who goes on with a stream has lost it: if it still runs here, nobody reads it any more."""
        for generation in tuple(self._running):
            if generation.session_key == key:
                generation.abort(ApiError(Code.CANCELLED, "the client goes on elsewhere"))
        until = self.clock() + RELEASE_SECONDS
        while self.named_sessions.is_busy(key) and self.clock() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _on_closed(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._ended.set()

    async def wait_for_no_requests(self, seconds: float, until: float) -> bool:
        """True once no request has come for so long since now; False if they still come at `until`."""
        since = self.clock()
        while (now := self.clock()) < until:
            quiet_at = max(since, self._last_request_at) + seconds
            if quiet_at <= now:
                return True
            await asyncio.sleep(min(until, quiet_at) - now)
        return False

    async def wait_until_idle(self, seconds: float) -> bool:
        """True once nothing runs any more; False if something still does after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _find_model(self, name: str) -> tuple[ModelCard, ModelTokenizer]:
        card = self.backend.model_card(name)
        if card is None and not self.backend.is_discovery_complete():
            detail = "this gateway has just started, and finds out what is served"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)
        if card is None:
            raise model_not_found(name)
        if card.tokenizer is None:
            detail = f"the model {name!r} is starting: its tokenizer has not come yet"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)
        return card, card.tokenizer
