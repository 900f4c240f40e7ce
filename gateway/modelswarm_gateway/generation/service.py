"""Takes requests: model, prompt, defaults, limits; starts generations and knows which run.

Both doors use it; it knows the engine only as the contract in `engine.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from modelswarm_gateway.backend.protocol import Engine, ModelCard
from modelswarm_gateway.core.interface.effects import TurnRequest
from modelswarm_gateway.errors import ApiError, Code, model_not_found, stopping
from modelswarm_gateway.generation.generation import Begin, Generation, Place
from modelswarm_gateway.generation.named_sessions import Key, SessionBook, wire_name
from modelswarm_gateway.generation.request import Ask, max_tokens, prompt_tokens
from modelswarm_gateway.generation.resumption import Resumed, resumed
from modelswarm_gateway.generation.session_locator import Finder
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.models.tokenizer import ModelText
from modelswarm_gateway.timeouts import keepalive_within

RELEASE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    credit_ahead: int = 32
    sessions: int = 1000  # explicit ones, at most
    idle_seconds: float = 600.0
    keepalive_seconds: float = 5.0  # silence after which a client gets a sign of life
    generations: int = 4096  # turns at a time, at most


class Service:
    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        clock: Callable[[], float],
        settings: ServiceSettings | None = None,
    ) -> None:
        self.engine, self.metrics, self.clock = engine, metrics, clock
        self.settings = settings or ServiceSettings()
        self.book = SessionBook(
            lambda key, above: engine.open(key[0], wire_name(key), above),
            engine.close,
            clock,
            limit=self.settings.sessions,
            idle_seconds=self.settings.idle_seconds,
        )
        self._finder = Finder(engine, self.book, clock)
        self._place = Place(engine, self.book, metrics, clock, self._retire)
        self.accepting = True
        self.leaving = False  # clients are to go elsewhere; those that still come are served
        self._asked_at = clock()
        self._running: set[Generation] = set()
        self._ended = asyncio.Event()

    def keepalive_seconds(self, model: str) -> float:
        """Silence after which a client of that model gets a sign of life."""
        hold = self.engine.hold_seconds(model)
        return keepalive_within(self.settings.keepalive_seconds, hold)

    @property
    def running(self) -> int:
        return len(self._running)

    def abort_all(self) -> None:
        """Every turn that still runs ends with an error that says so."""
        for generation in tuple(self._running):
            generation.abort(stopping())

    async def start(self, ask: Ask) -> Generation:
        """Raises ApiError, or Elsewhere. The caller must `close` what it gets, whatever happens."""
        self._asked_at = asked_at = self.clock()
        here = ask.forwarded and ask.session_id and self.book.has((ask.model, ask.session_id))
        if not self.accepting and not here:  # nobody else can answer for a session that is here
            raise stopping()
        if len(self._running) >= self.settings.generations:
            detail = f"{self.settings.generations} requests are running already"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        card, text = self._model(ask.model)
        tokens = await prompt_tokens(ask, text, card.max_length)
        request = TurnRequest(
            tokens=tokens,
            max_tokens=max_tokens(ask, text),
            sampling=text.defaults.sampling(ask.options, secrets.randbits(64)),
            credit_ahead=self.settings.credit_ahead,
        )
        above, resume = 0, None
        if ask.session_id is not None:
            key = (ask.model, ask.session_id)
            if ask.after is not None:
                await self._release(key)
            above = await self._finder.bring(ask, key)
            resume = self._resumed(ask, key, tokens)
        begin = Begin(request, text, asked_at, above, resume)
        generation = Generation(self._place, ask, begin)
        self._running.add(generation)
        return generation

    async def lives_elsewhere(self, ask: Ask, door: str) -> bool | None:
        """Whether the gateway with that door still has the session of a named request; None: the servers know of no
        gateway that has it and lives."""
        assert ask.session_id is not None
        where = await self.engine.find(wire_name((ask.model, ask.session_id)), ask.model)
        return door in where.target.split(",") if where.living else None

    def _resumed(self, ask: Ask, key: Key, prompt: tuple[int, ...]) -> Resumed | None:
        if ask.after is None:
            return None
        if self.book.busy(key):
            raise self.book.is_busy(key)
        kept = self.engine.kept(self.book.name(key)) if self.book.has(key) else None
        return resumed(prompt, kept, ask.after, ask.mark)

    async def _release(self, key: Key) -> None:
        """Who goes on with a stream has lost it: if it still runs here, nobody reads it any more."""
        for generation in tuple(self._running):
            if generation.key == key:
                generation.abort(ApiError(Code.CANCELLED, "the client goes on elsewhere"))
        until = self.clock() + RELEASE_SECONDS
        while self.book.busy(key) and self.clock() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _retire(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._ended.set()

    async def unasked(self, seconds: float, until: float) -> bool:
        """True once no request has come for so long since now; False if they still come at `until`."""
        since = self.clock()
        while (now := self.clock()) < until:
            quiet_at = max(since, self._asked_at) + seconds
            if quiet_at <= now:
                return True
            await asyncio.sleep(min(until, quiet_at) - now)
        return False

    async def quiet(self, seconds: float) -> bool:
        """True once nothing runs any more; False if something still does after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self._running:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _model(self, name: str) -> tuple[ModelCard, ModelText]:
        card = self.engine.card(name)
        if card is None and not self.engine.knows():
            detail = "this gateway has just started, and finds out what is served"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)
        if card is None:
            raise model_not_found(name)
        if card.text is None:
            detail = f"the model {name!r} is starting: its tokenizer has not come yet"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)
        return card, card.text
