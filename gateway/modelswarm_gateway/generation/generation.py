"""One turn from its request to its last text: session, tokens, detokenizing, stop strings, credit.

Made by the service, read by an API. Knows the backend only as the contract in `backend/protocol.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from modelswarm.protocol.messages import Finish, PromptLogprob
from modelswarm.protocol.opaque import without_opaque
from modelswarm_gateway.backend.protocol import TurnBackend
from modelswarm_gateway.backend.token_stream import RowsEvent, StreamEvent, TokenEvent, TokenStream
from modelswarm_gateway.core.interface.errors import CoreError, UnknownSession
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import CLIENT_ENDED, ApiError, Code, from_core, hide_identities
from modelswarm_gateway.generation.logprobs import LogprobsBuffer, TokenLogprob
from modelswarm_gateway.generation.named_sessions import Evictions, NamedSessions, SessionKey
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import LogMark, ResumedTurn, SeenAnswer
from modelswarm_gateway.generation.rows.returned_rows import RowBlock, RowsBuffer
from modelswarm_gateway.generation.stop_strings import StopMatcher
from modelswarm_gateway.generation.tool_calls.answer import (
    PROMPT_END_TOKENS,
    AnswerParser,
    has_events,
)
from modelswarm_gateway.generation.tool_calls.events import (
    OutputEvent,
    TextDelta,
    merge_events,
)
from modelswarm_gateway.generation.tool_calls.families import NO_FORMAT, ChatFormat
from modelswarm_gateway.metrics.counters import Metrics, TurnOutcome
from modelswarm_gateway.models.detokenizer import detokenize_all
from modelswarm_gateway.models.tokenizer import ModelTokenizer

_UNSEEN_AT_ONCE = 64  # tokens of a chunk of a resumed turn: other tasks run between two of them
# Errors that refuse a turn before its first token.
_NOT_STARTED = (Code.NO_CAPACITY, Code.NO_SERVERS, Code.CONTEXT_LENGTH)


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Generated text (perhaps empty), the tokens that made it, and the finish reason of the last chunk.

    With log probabilities, tokens whose text is withheld come with a later chunk: a stream that is resumed behind this
    one must report theirs.
    """

    text: str
    tokens: tuple[int, ...]
    position: int  # of the first token
    end: int  # position after the last token
    received: int  # position after the last token that has come, withheld or not
    finish: str | None
    mark: str  # short hash of the log up to `end`; "" for a session without a name
    logprobs: tuple[TokenLogprob, ...] = ()  # of the tokens that belong to `text`, if requested
    events: tuple[OutputEvent, ...] | None = None  # None: the answer is nothing but its text
    rows: RowBlock | None = None  # of entries below `end`, and at the end of the answer all

    @property
    def output(self) -> tuple[OutputEvent, ...]:
        """Return what the client may see now, as typed events."""
        if self.events is not None:
            return self.events
        return (TextDelta(self.text),) if self.text else ()


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """Parts that all generations share."""

    backend: TurnBackend
    named_sessions: NamedSessions
    metrics: Metrics
    clock: Callable[[], float]
    on_closed: Callable[[Generation], None]


@dataclass(frozen=True, slots=True)
class TurnStart:
    """Values with which one turn starts."""

    turn: TurnRequest
    tokenizer: ModelTokenizer
    requested_at: float
    epoch_floor: int = 0  # highest epoch that other gateways have used for the session's name
    resumed: ResumedTurn | None = None  # None: a new turn
    position: int | None = None  # entries of the log behind which the input was appended
    form: ChatFormat = NO_FORMAT  # of the model's tool calls and reasoning
    rows: RowsBuffer | None = None  # None: no rows are returned


class Generation:
    """One turn as an API reads it: `next_chunk`, `acknowledge` what the client got, finally `close`."""

    def __init__(
        self, context: GenerationContext, request: GenerationRequest, start: TurnStart
    ) -> None:
        turn = start.turn
        self._context, self._request = context, request
        self._turn, self._epoch_floor = turn, start.epoch_floor
        self._form = start.form
        self.sampling = (start.resumed.turn if start.resumed else turn).sampling
        last = without_opaque(turn.tokens[-PROMPT_END_TOKENS:])
        self._answer = self._parser(start, last)
        markers = start.form.markers if self._answer else ()
        text = request.text
        self._detokenizer = start.tokenizer.detokenizer(last, markers, all_special=text.all_special)
        self._events: list[OutputEvent] = []  # of the next chunk
        self._stops = StopMatcher(request.stop, keeps_match=text.keeps_stop)
        self._logprobs = LogprobsBuffer() if turn.keeps_logprobs else None
        self._released: list[TokenLogprob] = []  # of the next chunk
        self._rows = start.rows
        self._echoes = request.echo and start.resumed is None  # before the first token
        self._finish: str | None = None  # the finish reason, once the turn has completed
        self._failure: Code | None = None
        self._refused = self._closed = self._aborted = False
        self.tokenizer = start.tokenizer
        self.prompt = turn.tokens
        self.position = start.position
        self.seen = SeenAnswer()  # of a resumed turn
        self.completion_tokens = self._resumed_tokens = 0
        self.session_key: SessionKey | None = (
            (request.model, request.session_id) if request.session_id else None
        )
        self._parent_key: SessionKey | None = (
            (request.model, request.parent_id) if request.parent_id else None
        )
        self._evictions = Evictions(context.backend, context.named_sessions)
        self._log_mark = LogMark(turn.tokens) if self.session_key else None
        self._withheld: list[int] = []  # tokens that came and are in no chunk yet
        # Time since which the client has not taken the last chunk; None while the next one is awaited.
        self._unread_since: float | None = context.clock()
        self._unseen: deque[OutputChunk] = deque()  # generated before the turn was resumed
        if start.resumed is None:
            self._session, self._stream = self._start_turn()
        else:
            self._session, self._stream = self._resume_turn(start.resumed)
        counts = not (turn.sampling.choice or start.resumed)  # neither a fork nor the same turn
        prompt = len(turn.tokens) if counts else 0
        self._meter = context.metrics.meter_turn(request.model, prompt, start.requested_at)
        self._meter.on_started(context.clock())

    def start_choice(self, choice: int) -> Generation:
        """Start another answer to the same prompt: the same seed, with noise of its own (R17, sampling).

        It forks from this one (R15, forks), so the prompt is computed once.
        """
        sampling = replace(self._turn.sampling, choice=choice)
        turn = replace(self._turn, sampling=sampling, parent=self._session)
        start = TurnStart(turn, self.tokenizer, self._context.clock(), form=self._form)
        return Generation(self._context, self._request, start)

    def _parser(self, start: TurnStart, last: Sequence[int]) -> AnswerParser | None:
        """Return the parser of the answer; None if it is plain text."""
        options, turn = self._request.answer, start.turn
        if options is None or not has_events(options, start.form):
            return None
        seed = self.sampling.seed + self.sampling.choice
        end = start.tokenizer.decode(last, start.form.markers)
        return AnswerParser(options, start.form, turn.tokens, end, seed)

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the generated tokens of the reasoning; None for plain text."""
        return None if self._answer is None else self._answer.reasoning_tokens

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        """Return the log probabilities of the prompt from its second token on; complete with the first chunk."""
        return self._stream.prompt_logprobs

    @property
    def stop_match(self) -> str | None:
        """Return the stop string that has ended the answer."""
        return self._stops.match

    @property
    def cached_tokens(self) -> int:
        """Return the tokens of the prompt that the session's servers still had when the turn began."""
        view = self._context.backend.session(self._session)
        return 0 if view is None else min(view.reused, len(self.prompt))

    def _start_turn(self) -> tuple[str, TokenStream]:
        """Open or acquire a session and start its turn; open it anew if the core has lost a kept one."""
        backend, sessions = self._context.backend, self._context.named_sessions
        for _ in range(2):
            session = (
                sessions.acquire(self.session_key, self._epoch_floor, self._parent_key)
                if self.session_key
                else backend.open_session(self._request.model)
            )
            try:
                return session, backend.start_turn(session, self._turn)
            except UnknownSession:
                self._drop_session(session)
            except CoreError as error:
                view = backend.session(session)
                self._release_session(session, keep=bool(view and (view.length or view.route)))
                raise from_core(error, self._request.prompt_field) from error
        raise ApiError(Code.INTERNAL, "the session was lost twice")

    def _resume_turn(self, resumed: ResumedTurn) -> tuple[str, TokenStream]:
        """Continue the turn; its first chunks are the generated text that the client has not seen."""
        assert self.session_key is not None
        backend, first = self._context.backend, len(self.prompt)
        session = self._context.named_sessions.acquire(self.session_key)
        self._stream = TokenStream(lambda _: None, lambda length: None)
        shown: list[str] = []
        seen: list[OutputEvent] = []
        seen_logprobs: list[TokenLogprob] = []
        end = first
        if self._log_mark is not None:
            self._log_mark.extend(resumed.generated[: max(0, resumed.last_read + 1 - first)])

        def put_unseen() -> None:
            begin, new = end - len(shown), resumed.generated[end - len(shown) - first : end - first]
            self._unseen.append(self._finish_chunk(shown, new, begin))
            shown.clear()

        for event in resumed.token_events(first):
            text, self._finish = self._detokenize(event)
            end = event.position + 1
            if event.position > resumed.last_read:
                shown.append(text)
                if len(shown) == _UNSEEN_AT_ONCE:
                    put_unseen()
            else:
                seen += (TextDelta(text),) if self._answer is None else self._events
                seen_logprobs += self._released
                self._released.clear()
                self._events.clear()
                if self._logprobs is not None and event.position == resumed.last_read:
                    self._logprobs.drop_withheld()
            if self._finish is not None:
                break
        self.seen = SeenAnswer(tuple(merge_events(seen)), tuple(seen_logprobs))
        self.completion_tokens = self._resumed_tokens = end - first
        if shown or not self._unseen:
            put_unseen()
        try:
            if self._finish is not None:
                backend.truncate_log(session, end)
                return session, self._stream
            self._turn = TurnRequest(
                tokens=(*self.prompt, *resumed.generated),
                max_tokens=resumed.turn.end - end,
                sampling=replace(resumed.turn.sampling, returned=self._turn.sampling.returned),
                credit_ahead=self._turn.credit_ahead,
                is_resumed=True,
                begin=first,
                keeps_logprobs=self._turn.keeps_logprobs,
                row_bytes=self._turn.row_bytes,
                tokenizer=self._turn.tokenizer,
            )
            return session, backend.start_turn(session, self._turn)
        except CoreError as error:
            self._release_session(session, keep=True)
            raise from_core(error, self._request.prompt_field) from error

    def _release_session(self, session: str, *, keep: bool) -> None:
        """Keep a named session if `keep` is set; close any other one."""
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
        """Wait for the next chunk; None after `timeout` seconds. Raise the ApiError that ended the turn."""
        self._unread_since = None
        try:
            return await self._next_chunk(timeout)
        finally:
            self._unread_since = self._context.clock()

    async def _next_chunk(self, timeout: float) -> OutputChunk | None:
        while self._unseen and not self._aborted:
            chunk = self._unseen.popleft()
            if chunk.tokens or chunk.finish is not None:
                await asyncio.sleep(0)
                return chunk
        while True:
            try:
                events = await self._stream.next_events(timeout)
            except ApiError as error:
                if not self._evict_and_retry(error):
                    self._refused = error.code in _NOT_STARTED and not self._generated_now
                    self._failure = error.code
                    raise
            else:
                echo = await self._echo_prompt() if events and self._echoes else ""
                return self._build_chunk(events, echo) if events else None

    def _evict_and_retry(self, error: ApiError) -> bool:
        """If the turn was refused for lack of pages, evict an idle named session and start the turn again."""
        if error.code is not Code.NO_CAPACITY or self._generated_now or self._closed:
            return False
        if not self._evictions.evict_for(self._session, self._parent_key):
            return False
        try:
            self._stream = self._context.backend.start_turn(self._session, self._turn)
        except CoreError as broken:
            raise from_core(broken, self._request.prompt_field) from error
        return True

    @property
    def _generated_now(self) -> int:
        """Tokens generated by this call; without those that a resumed turn had before."""
        return self.completion_tokens - self._resumed_tokens

    def _build_chunk(self, events: Sequence[StreamEvent], echo: str) -> OutputChunk:
        texts = [echo]
        tokens: list[int] = []
        finish: str | None = None
        for event in events:
            if isinstance(event, RowsEvent):
                assert self._rows is not None
                self._rows.put_rows(event)
                continue
            if event.token >= 0:
                tokens.append(event.token)
            text, finish = self._detokenize(event)
            texts.append(text)
            if finish is not None:
                break
        self._finish = finish
        first = len(self.prompt) + self.completion_tokens
        if tokens:
            self._meter.on_tokens(len(tokens), self._context.clock())
            self.completion_tokens += len(tokens)
        return self._finish_chunk(texts, tokens, first)

    async def _echo_prompt(self) -> str:
        """Return the prompt's text, once, with the log probabilities of its tokens if they are reported."""
        self._echoes = False
        detokenizer = self.tokenizer.detokenizer((), all_special=self._request.text.all_special)
        pieces = await detokenize_all(detokenizer, self.prompt)
        text = "".join(pieces)
        if self._logprobs is not None:
            scores = [None, *self._stream.prompt_logprobs]
            for token, score, piece in zip(self.prompt, scores, pieces, strict=True):
                self._logprobs.add_prompt(token, score, piece, self.sampling.logprobs)
            self._released += self._logprobs.release(text, is_last=True)
        return text

    def _finish_chunk(self, texts: Sequence[str], tokens: Sequence[int], first: int) -> OutputChunk:
        """Return the chunk of these texts and tokens, the first at position `first`, with the mark of the log."""
        received, came = first + len(tokens), [*self._withheld, *tokens]
        shown = self._count_shown(came)
        self._withheld = came[shown:]
        end = received - len(self._withheld)
        if self._log_mark is not None:
            self._log_mark.extend(came[:shown])
        mark = "" if self._log_mark is None else str(self._log_mark)
        logprobs, self._released = tuple(self._released), []
        events, self._events = tuple(merge_events(self._events)), []
        return OutputChunk(
            "".join(texts),
            tuple(came[:shown]),
            end - shown,
            end,
            received,
            self._finish_reason(),
            mark,
            logprobs,
            None if self._answer is None else events,
            None if self._rows is None else self._rows.take(end if self._finish is None else None),
        )

    def _count_shown(self, tokens: Sequence[int]) -> int:
        """Return how many of the tokens that have come are in this chunk."""
        if self._logprobs is None or self._finish is not None:
            return len(tokens)
        return max(0, len(tokens) - self._logprobs.withheld)

    def _finish_reason(self) -> str | None:
        has_calls = self._answer is not None and self._answer.has_calls
        return "tool_calls" if has_calls and self._finish == Finish.STOP.value else self._finish

    def _detokenize(self, event: TokenEvent) -> tuple[str, str | None]:
        """Return the text that one token makes visible, and the finish reason if the turn ends with it."""
        piece = self._decode(event)
        text, finish = self._match_stops(event, piece)
        if self._answer is not None:
            is_last = finish is not None
            self._events += self._answer.add_token(event.position, text, is_last=is_last)
            if self._answer.has_ended and not is_last:
                self._stream.stop_at(event.position + 1)
                finish = Finish.STOP.value
        if self._logprobs is not None:
            has_cut = self._stops.match is not None and not self._request.text.keeps_stop
            is_last = finish is not None and not has_cut
            self._logprobs.add_token(event, piece)
            self._released += self._logprobs.release(text, is_last=is_last)
        return text, finish

    def _decode(self, event: TokenEvent) -> str:
        piece = ""
        has_text = event.finish is not Finish.STOP or self._request.text.keeps_stop
        if event.token >= 0 and has_text:  # by default a stop token has none
            piece = self._detokenizer.feed(event.token)
        if event.finish is not Finish.NONE:
            piece += self._detokenizer.flush()
        return piece

    def _match_stops(self, event: TokenEvent, piece: str) -> tuple[str, str | None]:
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
        """The reason why the session is held; empty while it is not."""
        view = self._context.backend.session(self._session)
        return "" if view is None else hide_identities(view.hold_reason)

    def acknowledge(self, chunk: OutputChunk) -> None:
        """Grant credit for more tokens or rows, because the client has this chunk (R7, credit)."""
        if self._finish is None and not self._closed:
            end = chunk.received
            if self._rows is not None and not self.completion_tokens:
                end = self._rows.end  # in the prompt
            self._stream.read_to(end)

    def abort(self, error: ApiError) -> None:
        """Make `next_chunk` raise `error` at once: the client disconnected, or the gateway stops."""
        if self._finish is None and not self._closed:
            self._aborted = True
            self._stream.abort(error)

    def is_unread_since(self, time: float) -> bool:
        """Return whether the client has not taken a chunk since then."""
        return self._unread_since is not None and self._unread_since <= time

    def end(self, error: ApiError) -> None:
        """End the turn at once, even while its API waits for the client. The API gets `error` if it goes on."""
        self.abort(error)
        self.close()

    def close(self) -> None:
        """Release the turn.

        A named session is kept if the turn completed, was refused, was cancelled by the client, or the gateway is
        stopping. Otherwise it is dropped.
        """
        if self._closed:
            return
        self._closed = True
        self._context.on_closed(self)
        self._record_metrics()
        keep = self._finish is not None or (self._refused and self._has_run())
        if self.session_key and not keep and self._failure in (None, *CLIENT_ENDED, Code.STOPPING):
            keep = self._park_session()
        self._release_session(self._session, keep=keep)

    def _has_run(self) -> bool:
        """Return whether a turn of the session has run.

        A refused first turn left nothing on any server. If kept, it would hide a session of that name at another
        gateway, whose servers could not be reached during the search.
        """
        view = self._context.backend.session(self._session)
        return view is not None and view.has_run

    def _park_session(self) -> bool:
        """Park the session of a cancelled turn, so that the client may resume it; return False if the core lost it."""
        try:
            self._context.backend.park_session(self._session)
        except UnknownSession:
            return False
        return True

    def _record_metrics(self) -> None:
        context, outcome = self._context, self._outcome()
        self._meter.on_ended(outcome, context.backend.session(self._session), context.clock())
        context.metrics.count_turn(self._request.model, outcome, self._finish)

    def _outcome(self) -> TurnOutcome:
        if self._finish is not None:
            return TurnOutcome.RECOVERED if self._stream.reroutes else TurnOutcome.COMPLETED
        if self._refused:
            return TurnOutcome.REFUSED
        left = (None, *CLIENT_ENDED, Code.SESSION_ELSEWHERE)  # the last: for another gateway
        return TurnOutcome.CANCELLED if self._failure in left else TurnOutcome.FAILED
