"""One turn from its request to its last piece of text: session, tokens, detokenising, stop strings, credit.

Made by the service, read by a door. Knows the engine only as the contract in `engine.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from modelswarm.protocol.messages import Finish
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.backend.token_stream import TokenEvent, TokenStream
from modelswarm_gateway.core.interface.errors import CoreError, UnknownSession
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import ApiError, Code, from_core
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import LogMark, ResumedTurn
from modelswarm_gateway.generation.stop_strings import StopMatcher
from modelswarm_gateway.metrics.counters import Metrics, TurnOutcome
from modelswarm_gateway.models.tokenizer import ModelTokenizer

_NOT_STARTED = (Code.NO_CAPACITY, Code.NO_SERVERS, Code.CONTEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """What came: some text (perhaps none), the tokens it came with, and how the turn ended if it did."""

    text: str
    tokens: tuple[int, ...]
    position: int  # of the first token
    end: int  # give it to `Generation.taken` once the client has the piece
    finish: str | None
    mark: str  # of the log up to `end`; "" of a session without a name


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """Where generations run: what all of them share."""

    backend: SessionBackend
    named_sessions: NamedSessions
    metrics: Metrics
    clock: Callable[[], float]
    on_closed: Callable[[Generation], None]


@dataclass(frozen=True, slots=True)
class TurnStart:
    """With what one turn begins."""

    turn: TurnRequest
    tokenizer: ModelTokenizer
    requested_at: float
    epoch_floor: int = 0  # epochs of the session's name that others have used
    resumed: ResumedTurn | None = None  # the turn had begun before


class Generation:
    """One turn as a door reads it: `take` pieces, tell them `taken`, `close`."""

    def __init__(
        self, context: GenerationContext, ask: GenerationRequest, start: TurnStart
    ) -> None:
        request = start.turn
        self._context, self._request, self._turn, self._epoch_floor = (
            context,
            ask,
            request,
            start.epoch_floor,
        )
        self._detokenizer = start.tokenizer.detokenizer(request.tokens)
        self._stops = StopMatcher(ask.stop)
        self._meter = context.metrics.meter_turn(ask.model, len(request.tokens), start.requested_at)
        self._finish: str | None = None  # how it ended, once it has ended well
        self._failure: Code | None = None
        self._refused = self._closed = self._aborted = False
        self.prompt = request.tokens
        self.completion_tokens = self._resumed_tokens = 0
        self.session_key: SessionKey | None = (
            (ask.model, ask.session_id) if ask.session_id else None
        )
        self._log_mark = LogMark(request.tokens) if self.session_key else None
        self._unseen_chunk: OutputChunk | None = (
            None  # what was generated before, and the client has not seen
        )
        if start.resumed is None:
            self._session, self._stream = self._start_turn()
        else:
            self._session, self._stream = self._resume_turn(start.resumed)
        self._meter.on_started(context.clock())

    def _start_turn(self) -> tuple[str, TokenStream]:
        """A session with its turn started; opened anew when the core has lost a kept one."""
        engine, book = self._context.backend, self._context.named_sessions
        for _ in range(2):
            session = (
                book.acquire(self.session_key, self._epoch_floor)
                if self.session_key
                else engine.open_session(self._request.model)
            )
            try:
                return session, engine.start_turn(session, self._turn)
            except UnknownSession:
                self._drop_session(session)
            except CoreError as error:
                self._release_session(session, keep=True)
                raise from_core(error, self._request.prompt_field) from error
        raise ApiError(Code.INTERNAL, "the session was lost twice")

    def _resume_turn(self, resumed: ResumedTurn) -> tuple[str, TokenStream]:
        """Shows again what was generated, as far as the client has not seen it, and goes on if that was not all."""
        assert self.session_key is not None
        engine, first = self._context.backend, len(self.prompt)
        session = self._context.named_sessions.acquire(self.session_key)
        self._stream = TokenStream(first, lambda _: None, lambda length: None)
        shown: list[str] = []
        end = first
        for event in resumed.token_events(first):
            text, self._finish = self._detokenize(event)
            end = event.position + 1
            if event.position > resumed.last_read:
                shown.append(text)
            if self._finish is not None:
                break
        self.completion_tokens = self._resumed_tokens = end - first
        new = resumed.generated[max(0, resumed.last_read + 1 - first) : end - first]
        self._unseen_chunk = self._finish_chunk(shown, new, end - len(new))
        try:
            if self._finish is not None:
                engine.truncate_log(session, end)
                return session, self._stream
            self._turn = TurnRequest(
                tokens=(*self.prompt, *resumed.generated),
                max_tokens=resumed.turn.end - end,
                sampling=resumed.turn.sampling,
                credit_ahead=self._turn.credit_ahead,
                begun=True,
            )
            return session, engine.start_turn(session, self._turn)
        except CoreError as error:
            self._release_session(session, keep=True)
            raise from_core(error, self._request.prompt_field) from error

    def _release_session(self, session: str, *, keep: bool) -> None:
        """A session the client named may be kept; all others end with their turn."""
        if self.session_key and keep:
            self._context.named_sessions.release(self.session_key)
        else:
            self._drop_session(session)

    def _drop_session(self, session: str) -> None:
        if self.session_key:
            self._context.named_sessions.drop_session(self.session_key)
        else:
            self._context.backend.close_session(session)

    async def next_chunk(self, timeout: float) -> OutputChunk | None:
        """What has come; None if nothing did within `timeout` seconds. Raises the ApiError that ended the turn."""
        if self._unseen_chunk is not None and not self._aborted:
            said, self._unseen_chunk = self._unseen_chunk, None
            if said.tokens or said.finish is not None:
                return said
        while True:
            try:
                events = await self._stream.next_events(timeout)
            except ApiError as error:
                if not self._evict_and_retry(error):
                    self._refused = error.code in _NOT_STARTED and not self._generated_now
                    self._failure = error.code
                    raise
            else:
                return self._build_chunk(events) if events else None

    def _evict_and_retry(self, error: ApiError) -> bool:
        """Refused for want of room: a kept session that nobody uses gives way, and the turn is tried again."""
        if error.code is not Code.NO_CAPACITY or self._generated_now or self._closed:
            return False
        if not self._context.named_sessions.evict_idle(
            self._request.model
        ):  # those of others hold no page that helps
            return False
        try:
            self._stream = self._context.backend.start_turn(self._session, self._turn)
        except CoreError as broken:
            raise from_core(broken, self._request.prompt_field) from error
        return True

    @property
    def _generated_now(self) -> int:
        """Tokens that this turn has generated, without those that it had before."""
        return self.completion_tokens - self._resumed_tokens

    def _build_chunk(self, events: Sequence[TokenEvent]) -> OutputChunk:
        texts: list[str] = []
        tokens: list[int] = []
        finish: str | None = None
        for event in events:
            if event.token >= 0:
                tokens.append(event.token)
            text, finish = self._detokenize(event)
            texts.append(text)
            if finish is not None:
                break
        self._finish = finish
        if tokens:
            self._meter.on_tokens(len(tokens), self._context.clock())
            self.completion_tokens += len(tokens)
        return self._finish_chunk(texts, tokens, events[0].position)

    def _finish_chunk(self, texts: Sequence[str], tokens: Sequence[int], first: int) -> OutputChunk:
        """The piece that ends with all that was shown."""
        mark = "" if self._log_mark is None else str(self._log_mark)
        end = first + len(tokens)
        return OutputChunk("".join(texts), tuple(tokens), first, end, self._finish, mark)

    def _detokenize(self, event: TokenEvent) -> tuple[str, str | None]:
        """The text that one token makes visible, and how the turn ends with it, if it does."""
        piece = ""
        if event.token >= 0 and self._log_mark is not None:
            self._log_mark.extend((event.token,))
        if event.token >= 0 and event.finish is not Finish.STOP:  # the token that stops is no text
            piece = self._detokenizer.feed(event.token)
        if event.finish is not Finish.NONE:
            piece += self._detokenizer.flush()
        found = self._stops.feed(piece)
        if found.matched:
            if event.finish is Finish.NONE:
                self._stream.stop_at(event.position + 1)
            return found.text, Finish.STOP.value
        if event.finish is not Finish.NONE:
            return found.text + self._stops.flush(), event.finish.value
        return found.text, None

    @property
    def hold_reason(self) -> str:
        """What the session is held for; empty while it is not."""
        view = self._context.backend.session(self._session)
        return "" if view is None else view.waits

    def acknowledge(self, chunk: OutputChunk) -> None:
        """The client has it: the swarm may go on (R7)."""
        if self._finish is None and not self._closed:
            self._stream.read_to(chunk.end)

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
        self._context.on_closed(self)
        self._record_metrics()
        keep = self._finish is not None or (self._refused and self._has_hops())
        if self.session_key and not keep and self._failure in (None, Code.CANCELLED, Code.STOPPING):
            keep = self._park_session()
        self._release_session(self._session, keep=keep)

    def _has_hops(self) -> bool:
        """Of a first turn that was refused nothing is anywhere: kept, it would hide a session of that name that another
        gateway has, and whose servers were out of sight when it was looked for."""
        view = self._context.backend.session(self._session)
        return view is not None and bool(view.route)

    def _park_session(self) -> bool:
        """The client left before the end: it may come back for the rest."""
        try:
            self._context.backend.park_session(self._session)
        except UnknownSession:
            return False
        return True

    def _record_metrics(self) -> None:
        place, outcome = self._context, self._outcome()
        self._meter.on_ended(outcome, place.backend.session(self._session), place.clock())
        place.metrics.count_turn(self._request.model, outcome, self._finish)

    def _outcome(self) -> TurnOutcome:
        if self._finish is not None:
            return TurnOutcome.RECOVERED if self._stream.reroutes else TurnOutcome.COMPLETED
        if self._refused:
            return TurnOutcome.REFUSED
        left = self._failure in (None, Code.CANCELLED)
        return TurnOutcome.CANCELLED if left else TurnOutcome.FAILED
