"""One turn from its request to its last piece of text: session, tokens, detokenising, stop strings, credit.

Made by the service, read by a door. Knows the engine only as the contract in `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import Finish
from modelswarm_gateway.backend.protocol import Engine, TokenEvent, TokenStream
from modelswarm_gateway.core.interface.effects import CoreError, TurnRequest, UnknownSession
from modelswarm_gateway.errors import ApiError, Code, from_core
from modelswarm_gateway.generation.named_sessions import Key, SessionBook
from modelswarm_gateway.generation.request import Ask
from modelswarm_gateway.generation.resumption import LogMark, Resumed
from modelswarm_gateway.generation.stop_strings import StopMatcher
from modelswarm_gateway.metrics.counters import Metrics, Outcome
from modelswarm_gateway.models.tokenizer import ModelText

_NOT_STARTED = (Code.NO_CAPACITY, Code.NO_SERVERS, Code.CONTEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class Piece:
    """What came: some text (perhaps none), the tokens it came with, and how the turn ended if it did."""

    text: str
    tokens: tuple[int, ...]
    position: int  # of the first token
    end: int  # give it to `Generation.taken` once the client has the piece
    finish: str | None
    mark: str  # of the log up to `end`; "" of a session without a name


@dataclass(frozen=True, slots=True)
class Place:
    """Where generations run: what all of them share."""

    engine: Engine
    book: SessionBook
    metrics: Metrics
    clock: Callable[[], float]
    ended: Callable[[Generation], None]


@dataclass(frozen=True, slots=True)
class Begin:
    """With what one turn begins."""

    request: TurnRequest
    text: ModelText
    asked_at: float
    above: int = 0  # epochs of the session's name that others have used
    resumed: Resumed | None = None  # the turn had begun before


class Generation:
    """One turn as a door reads it: `take` pieces, tell them `taken`, `close`."""

    def __init__(self, place: Place, ask: Ask, begin: Begin) -> None:
        request = begin.request
        self._place, self._ask, self._request, self._above = place, ask, request, begin.above
        self._detokeniser = begin.text.detokeniser(request.tokens)
        self._stops = StopMatcher(ask.stop)
        self._meter = place.metrics.turn(ask.model, len(request.tokens), begin.asked_at)
        self._finish: str | None = None  # how it ended, once it has ended well
        self._failure: Code | None = None
        self._refused = self._closed = self._aborted = False
        self.prompt = request.tokens
        self.completion_tokens = self._before = 0
        self.key: Key | None = (ask.model, ask.session_id) if ask.session_id else None
        self._mark = LogMark(request.tokens) if self.key else None
        self._said: Piece | None = None  # what was generated before, and the client has not seen
        if begin.resumed is None:
            self._session, self._stream = self._begin()
        else:
            self._session, self._stream = self._resume(begin.resumed)
        self._meter.began(place.clock())

    def _begin(self) -> tuple[str, TokenStream]:
        """A session with its turn started; opened anew when the core has lost a kept one."""
        engine, book = self._place.engine, self._place.book
        for _ in range(2):
            session = (
                book.acquire(self.key, self._above) if self.key else engine.open(self._ask.model)
            )
            try:
                return session, engine.turn(session, self._request)
            except UnknownSession:
                self._discard(session)
            except CoreError as error:
                self._leave(session, keep=True)
                raise from_core(error, self._ask.field) from error
        raise ApiError(Code.INTERNAL, "the session was lost twice")

    def _resume(self, resumed: Resumed) -> tuple[str, TokenStream]:
        """Shows again what was generated, as far as the client has not seen it, and goes on if that was not all."""
        assert self.key is not None
        engine, first = self._place.engine, len(self.prompt)
        session = self._place.book.acquire(self.key)
        self._stream = TokenStream(first, lambda _: None, lambda length: None)
        shown: list[str] = []
        end = first
        for event in resumed.events(first):
            text, self._finish = self._show(event)
            end = event.position + 1
            if event.position > resumed.after:
                shown.append(text)
            if self._finish is not None:
                break
        self.completion_tokens = self._before = end - first
        new = resumed.generated[max(0, resumed.after + 1 - first) : end - first]
        self._said = self._made_of(shown, new, end - len(new))
        try:
            if self._finish is not None:
                engine.keep(session, end)
                return session, self._stream
            self._request = TurnRequest(
                tokens=(*self.prompt, *resumed.generated),
                max_tokens=resumed.turn.end - end,
                sampling=resumed.turn.sampling,
                credit_ahead=self._request.credit_ahead,
                begun=True,
            )
            return session, engine.turn(session, self._request)
        except CoreError as error:
            self._leave(session, keep=True)
            raise from_core(error, self._ask.field) from error

    def _leave(self, session: str, *, keep: bool) -> None:
        """A session the client named may be kept; all others end with their turn."""
        if self.key and keep:
            self._place.book.release(self.key)
        else:
            self._discard(session)

    def _discard(self, session: str) -> None:
        if self.key:
            self._place.book.drop(self.key)
        else:
            self._place.engine.close(session)

    async def take(self, timeout: float) -> Piece | None:
        """What has come; None if nothing did within `timeout` seconds. Raises the ApiError that ended the turn."""
        if self._said is not None and not self._aborted:
            said, self._said = self._said, None
            if said.tokens or said.finish is not None:
                return said
        while True:
            try:
                events = await self._stream.take(timeout)
            except ApiError as error:
                if not self._make_room(error):
                    self._refused = error.code in _NOT_STARTED and not self._made
                    self._failure = error.code
                    raise
            else:
                return self._piece(events) if events else None

    def _make_room(self, error: ApiError) -> bool:
        """Refused for want of room: a kept session that nobody uses gives way, and the turn is tried again."""
        if error.code is not Code.NO_CAPACITY or self._made or self._closed:
            return False
        if not self._place.book.evict(self._ask.model):  # those of others hold no page that helps
            return False
        try:
            self._stream = self._place.engine.turn(self._session, self._request)
        except CoreError as broken:
            raise from_core(broken, self._ask.field) from error
        return True

    @property
    def _made(self) -> int:
        """Tokens that this turn has generated, without those that it had before."""
        return self.completion_tokens - self._before

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
        self._finish = finish
        if tokens:
            self._meter.tokens(len(tokens), self._place.clock())
            self.completion_tokens += len(tokens)
        return self._made_of(texts, tokens, events[0].position)

    def _made_of(self, texts: Sequence[str], tokens: Sequence[int], first: int) -> Piece:
        """The piece that ends with all that was shown."""
        mark = "" if self._mark is None else str(self._mark)
        end = first + len(tokens)
        return Piece("".join(texts), tuple(tokens), first, end, self._finish, mark)

    def _show(self, event: TokenEvent) -> tuple[str, str | None]:
        """The text that one token makes visible, and how the turn ends with it, if it does."""
        piece = ""
        if event.token >= 0 and self._mark is not None:
            self._mark.add((event.token,))
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

    @property
    def waits(self) -> str:
        """What the session is held for; empty while it is not."""
        view = self._place.engine.session(self._session)
        return "" if view is None else view.waits

    def taken(self, piece: Piece) -> None:
        """The client has it: the swarm may go on (R7)."""
        if self._finish is None and not self._closed:
            self._stream.read_to(piece.end)

    def abort(self, error: ApiError) -> None:
        """Makes `take` raise `error` at once, from outside: the client left, or the gateway stops."""
        if self._finish is None and not self._closed:
            self._aborted = True
            self._stream.abort(error)

    def close(self) -> None:
        """Frees what the turn holds. A named session is kept if its turn ended well, never started, or was left, by its
        client or for this gateway's end."""
        if self._closed:
            return
        self._closed = True
        self._place.ended(self)
        self._account()
        keep = self._finish is not None or (self._refused and self._has_hops())
        if self.key and not keep and self._failure in (None, Code.CANCELLED, Code.STOPPING):
            keep = self._park()
        self._leave(self._session, keep=keep)

    def _has_hops(self) -> bool:
        """Of a first turn that was refused nothing is anywhere: kept, it would hide a session of that name that another
        gateway has, and whose servers were out of sight when it was looked for."""
        view = self._place.engine.session(self._session)
        return view is not None and bool(view.route)

    def _park(self) -> bool:
        """The client left before the end: it may come back for the rest."""
        try:
            self._place.engine.leave(self._session)
        except UnknownSession:
            return False
        return True

    def _account(self) -> None:
        place, outcome = self._place, self._outcome()
        self._meter.ended(outcome, place.engine.session(self._session), place.clock())
        place.metrics.stream(self._ask.model, outcome, self._finish)

    def _outcome(self) -> Outcome:
        if self._finish is not None:
            return Outcome.RECOVERED if self._stream.reroutes else Outcome.COMPLETED
        if self._refused:
            return Outcome.REFUSED
        left = self._failure in (None, Code.CANCELLED)
        return Outcome.CANCELLED if left else Outcome.FAILED
