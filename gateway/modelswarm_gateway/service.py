"""From a request to pieces of text: prompt, defaults, session, tokens, detokenising, stop strings, credit.

Both doors use it and neither knows more than it gives; it knows the engine only as the contract in `engine.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from modelswarm.protocol.messages import Finish
from modelswarm_gateway.core.effects import CoreError, PromptTooLong, TurnRequest, UnknownSession
from modelswarm_gateway.defaults import Options
from modelswarm_gateway.engine import Engine, ModelCard, TokenEvent, TokenStream
from modelswarm_gateway.errors import ApiError, Code, from_core, invalid, model_not_found, stopping
from modelswarm_gateway.metrics import Metrics
from modelswarm_gateway.sessions import Key, SessionBook
from modelswarm_gateway.stops import StopMatcher
from modelswarm_gateway.template import TemplateError
from modelswarm_gateway.text import ModelText

TEXT_MAX_TOKENS = 16  # OpenAI's default for text completions
MOST_STOPS, LONGEST_STOP = 16, 1000  # stop strings of a request, characters of one
_NOT_STARTED = (Code.NO_CAPACITY, Code.NO_SERVERS, Code.CONTEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[Mapping[str, Any]]
    variables: Mapping[str, Any] = field(default_factory=dict)  # for the template


Prompt: TypeAlias = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, whichever door it came through."""

    model: str
    prompt: Prompt
    field: str  # that carried the prompt, for errors
    options: Options
    stop: tuple[str, ...] = ()
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """What came: some text (perhaps none), the tokens it came with, and how the turn ended if it did."""

    text: str
    tokens: tuple[int, ...]
    position: int  # of the first token
    end: int  # give it to `Generation.taken` once the client has the piece
    finish: str | None


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    credit_ahead: int = 32
    sessions: int = 1000  # explicit ones, at most
    idle_seconds: float = 600.0
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
            engine.open,
            engine.close,
            clock,
            limit=self.settings.sessions,
            idle_seconds=self.settings.idle_seconds,
        )
        self.accepting = True
        self._running: set[Generation] = set()
        self._ended = asyncio.Event()

    @property
    def running(self) -> int:
        return len(self._running)

    def abort_all(self) -> None:
        """Every turn that still runs ends with an error that says so."""
        for generation in tuple(self._running):
            generation.abort(stopping())

    async def start(self, ask: Ask) -> Generation:
        """Raises ApiError. The caller must `close` what it gets, whatever happens."""
        asked_at = self.clock()
        if not self.accepting:
            raise stopping()
        if len(self._running) >= self.settings.generations:
            detail = f"{self.settings.generations} requests are running already"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        card, text = self._model(ask.model)
        tokens = await _tokens(ask, text, card.max_length)
        if not tokens:
            raise invalid(
                ask.field, f"{ask.field}: the prompt is empty; at least one token is needed"
            )
        request = TurnRequest(
            tokens=tokens,
            max_tokens=_max_tokens(ask, text),
            sampling=text.defaults.sampling(ask.options, secrets.randbits(64)),
            credit_ahead=self.settings.credit_ahead,
        )
        self.metrics.prompt(card.name, len(tokens))
        generation = Generation(self, ask, request, text, asked_at)
        self._running.add(generation)
        return generation

    def ended(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._ended.set()

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
        if card is None:
            raise model_not_found(name)
        if card.text is None:
            detail = f"the model {name!r} is starting: its tokenizer has not come yet"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)
        return card, card.text


class Generation:
    """One turn as a door reads it: `take` pieces, tell them `taken`, `close`."""

    def __init__(
        self, service: Service, ask: Ask, request: TurnRequest, text: ModelText, asked_at: float
    ) -> None:
        self._service, self._ask, self._request = service, ask, request
        self._detokeniser = text.detokeniser(request.tokens)
        self._stops = StopMatcher(ask.stop)
        self._meter = service.metrics.meter(ask.model)
        self._last = asked_at
        self._finished = self._refused = self._closed = False
        self.prompt = request.tokens
        self.completion_tokens = 0
        self._key: Key | None = (ask.model, ask.session_id) if ask.session_id else None
        self._session, self._stream = self._begin()

    def _begin(self) -> tuple[str, TokenStream]:
        """A session with its turn started; opened anew when the core has lost a kept one."""
        engine, book = self._service.engine, self._service.book
        for _ in range(2):
            session = book.acquire(self._key) if self._key else engine.open(self._ask.model)
            try:
                return session, engine.turn(session, self._request)
            except UnknownSession:
                self._discard(session)
            except CoreError as error:
                self._leave(session, keep=True)
                raise from_core(error, self._ask.field) from error
        raise ApiError(Code.INTERNAL, "the session was lost twice")

    def _leave(self, session: str, *, keep: bool) -> None:
        """A session the client named may be kept; all others end with their turn."""
        if self._key and keep:
            self._service.book.release(self._key)
        else:
            self._discard(session)

    def _discard(self, session: str) -> None:
        if self._key:
            self._service.book.drop(self._key)
        else:
            self._service.engine.close(session)

    async def take(self, timeout: float) -> Piece | None:
        """What has come; None if nothing did within `timeout` seconds. Raises the ApiError that ended the turn."""
        while True:
            try:
                events = await self._stream.take(timeout)
            except ApiError as error:
                if not self._make_room(error):
                    self._refused = error.code in _NOT_STARTED and not self.completion_tokens
                    raise
            else:
                return self._piece(events) if events else None

    def _make_room(self, error: ApiError) -> bool:
        """Refused for want of room: a kept session that nobody uses gives way, and the turn is tried again."""
        if error.code is not Code.NO_CAPACITY or self.completion_tokens or self._closed:
            return False
        if not self._service.book.evict():
            return False
        try:
            self._stream = self._service.engine.turn(self._session, self._request)
        except CoreError as broken:
            raise from_core(broken, self._ask.field) from error
        return True

    def _piece(self, events: Sequence[TokenEvent]) -> Piece:
        texts: list[str] = []
        tokens: list[int] = []
        finish: str | None = None
        for event in events:
            if event.token >= 0:
                tokens.append(event.token)
            text, finish = self._show(event)
            texts.append(text)
            if finish is not None:
                break
        self._finished = finish is not None
        self._count(len(tokens))
        first = events[0].position
        return Piece("".join(texts), tuple(tokens), first, first + len(tokens), finish)

    def _show(self, event: TokenEvent) -> tuple[str, str | None]:
        """The text that one token makes visible, and how the turn ends with it, if it does."""
        piece = ""
        if event.token >= 0 and event.finish is not Finish.STOP:  # the token that stops is no text
            piece = self._detokeniser.feed(event.token)
        if event.finish is not Finish.NONE:
            piece += self._detokeniser.flush()
        found = self._stops.feed(piece)
        if found.matched:
            if event.finish is Finish.NONE:
                self._stream.stop_at(event.position + 1)
            return found.text, Finish.STOP.value
        if event.finish is not Finish.NONE:
            return found.text + self._stops.flush(), event.finish.value
        return found.text, None

    def _count(self, tokens: int) -> None:
        if not tokens:
            return
        now = self._service.clock()
        if self.completion_tokens:
            self._meter.next_tokens(tokens, now - self._last)
        else:
            self._meter.first_tokens(tokens, now - self._last)
        self.completion_tokens += tokens
        self._last = now

    def taken(self, piece: Piece) -> None:
        """The client has it: the swarm may go on (R7)."""
        if not self._finished and not self._closed:
            self._stream.read_to(piece.end)

    def abort(self, error: ApiError) -> None:
        """Makes `take` raise `error` at once, from outside: the client left, or the gateway stops."""
        if not self._finished and not self._closed:
            self._stream.abort(error)

    def close(self) -> None:
        """Frees what the turn holds. A named session is kept if its turn ended well or never started."""
        if self._closed:
            return
        self._closed = True
        self._service.ended(self)
        self._leave(self._session, keep=self._finished or self._refused)


async def _tokens(ask: Ask, text: ModelText, limit: int) -> tuple[int, ...]:
    match ask.prompt:
        case TokenPrompt(ids):
            if 0 < limit < len(ids):  # before a long look at each of them
                raise from_core(PromptTooLong(len(ids), limit), ask.field)
            for place, token in enumerate(ids):
                if not 0 <= token < text.vocabulary:
                    detail = f"{token} is not a token: 0 to {text.vocabulary - 1} are"
                    raise invalid(ask.field, f"{ask.field}[{place}]: {detail}")
            return ids
        case TextPrompt(words):
            return tuple(await text.encode(words, special=True))
        case ChatPrompt(messages, variables):
            try:
                return tuple(await text.encode_chat(messages, variables))
            except TemplateError as error:
                raise invalid(ask.field, f"{ask.field}: {error}") from error


def _max_tokens(ask: Ask, text: ModelText) -> int | None:
    if ask.options.max_tokens is not None:
        return ask.options.max_tokens
    if text.defaults.max_tokens is not None or isinstance(ask.prompt, ChatPrompt):
        return text.defaults.max_tokens
    return TEXT_MAX_TOKENS
