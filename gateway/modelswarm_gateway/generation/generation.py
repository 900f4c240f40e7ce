"""One turn from its request to its last text: session, tokens, output, credit.

Made by the service, read by an API. Knows the backend only as the contract in `backend/protocol.py`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from modelswarm.protocol.messages import PromptLogprob
from modelswarm_gateway.backend.protocol import TurnBackend
from modelswarm_gateway.backend.token_stream import RowsEvent, StreamEvent, TokenStream
from modelswarm_gateway.core.interface.errors import CoreError, UnknownSession
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.errors import CLIENT_ENDED, ApiError, Code, from_core, hide_identities
from modelswarm_gateway.generation.named_sessions import Evictions, NamedSessions, SessionKey
from modelswarm_gateway.generation.output.logprobs import TokenLogprob
from modelswarm_gateway.generation.output.turn_output import OutputChunk, TurnOutput
from modelswarm_gateway.generation.request import GenerationRequest
from modelswarm_gateway.generation.resumption import ResumedTurn, SeenAnswer
from modelswarm_gateway.generation.rows.returned_rows import RowsBuffer
from modelswarm_gateway.generation.tool_calls.events import OutputEvent, merge_events
from modelswarm_gateway.generation.tool_calls.families import NO_FORMAT, ChatFormat
from modelswarm_gateway.metrics.counters import Metrics, TurnOutcome
from modelswarm_gateway.models.tokenizer import ModelTokenizer

_UNSEEN_AT_ONCE = 64  # tokens of a chunk of a resumed turn: other tasks run between two of them
# Errors that refuse a turn before its first token.
_NOT_STARTED = (Code.NO_CAPACITY, Code.NO_SERVERS, Code.CONTEXT_LENGTH)


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
        self._output = TurnOutput(
            request,
            turn,
            self.sampling,
            start.tokenizer,
            start.form,
            start.rows,
            lambda position: self._stream.stop_at(position),
        )
        self._echoes = request.echo and start.resumed is None  # before the first token
        self._failure: Code | None = None
        self._refused = self._closed = self._aborted = False
        self.tokenizer, self.prompt, self.position = start.tokenizer, turn.tokens, start.position
        self.seen = SeenAnswer()  # of a resumed turn
        self.completion_tokens = self._resumed_tokens = 0
        self.session_key: SessionKey | None = (
            (request.model, request.session_id) if request.session_id else None
        )
        self._parent_key: SessionKey | None = (
            (request.model, request.parent_id) if request.parent_id else None
        )
        self._evictions = Evictions(context.backend, context.named_sessions)
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

    @property
    def reasoning_tokens(self) -> int | None:
        """Return the generated tokens of the reasoning; None for plain text."""
        return self._output.reasoning_tokens

    @property
    def prompt_logprobs(self) -> Sequence[PromptLogprob]:
        """Return the log probabilities of the prompt from its second token on; complete with the first chunk."""
        return self._stream.prompt_logprobs

    @property
    def stop_match(self) -> str | None:
        """Return the stop string that has ended the answer."""
        return self._output.stop_match

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
        backend, output, first = self._context.backend, self._output, len(self.prompt)
        session = self._context.named_sessions.acquire(self.session_key)
        self._stream = TokenStream(lambda _: None, lambda length: None)
        shown: list[str] = []
        seen: list[OutputEvent] = []
        seen_logprobs: list[TokenLogprob] = []
        end = first
        output.skip(resumed.generated[: max(0, resumed.last_read + 1 - first)])

        def put_unseen() -> None:
            begin, new = end - len(shown), resumed.generated[end - len(shown) - first : end - first]
            self._unseen.append(output.make_chunk(shown, new, begin))
            shown.clear()

        for event in resumed.token_events(first):
            text = output.add_token(event)
            end = event.position + 1
            if event.position > resumed.last_read:
                shown.append(text)
                if len(shown) == _UNSEEN_AT_ONCE:
                    put_unseen()
            else:
                events, logprobs = output.take_read(text, is_last=end > resumed.last_read)
                seen += events
                seen_logprobs += logprobs
            if output.finish is not None:
                break
        self.seen = SeenAnswer(tuple(merge_events(seen)), tuple(seen_logprobs))
        self._resumed_tokens = end - first
        self.completion_tokens = min(end, resumed.last_read + 1) - first  # grows with the chunks
        if shown or not self._unseen:
            put_unseen()
        try:
            if output.finish is not None:
                backend.truncate_log(session, end)
                return session, self._stream
            self._turn = TurnRequest(
                tokens=(*self.prompt, *resumed.generated),
                max_tokens=resumed.turn.end - end,
                sampling=resumed.sampling(self._turn.sampling),
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
            self.completion_tokens = chunk.received - len(self.prompt)
            if chunk.tokens or chunk.finish is not None:
                await asyncio.sleep(0)
                return chunk
        while True:
            try:
                events = await self._stream.next_events(timeout)
            except ApiError as error:
                if not self._evict_and_retry(error):
                    self._refused = error.code in _NOT_STARTED and not self._has_generated
                    self._failure = error.code
                    raise
            else:
                if not events:
                    return None
                echo = ""
                if self._echoes:
                    self._echoes = False
                    echo = await self._output.echo_prompt(self._stream.prompt_logprobs)
                return self._build_chunk(events, echo)

    def _evict_and_retry(self, error: ApiError) -> bool:
        """If the turn was refused for lack of pages, evict an idle named session and start the turn again."""
        if error.code is not Code.NO_CAPACITY or self._has_generated or self._closed:
            return False
        if not self._evictions.evict_for(self._session, self._parent_key):
            return False
        try:
            self._stream = self._context.backend.start_turn(self._session, self._turn)
        except CoreError as broken:
            raise from_core(broken, self._request.prompt_field) from error
        return True

    @property
    def _has_generated(self) -> bool:
        """True if tokens have come beside those that a resumed turn had before."""
        return self.completion_tokens > self._resumed_tokens

    def _build_chunk(self, events: Sequence[StreamEvent], echo: str) -> OutputChunk:
        texts = [echo]
        tokens: list[int] = []
        for event in events:
            if isinstance(event, RowsEvent):
                self._output.add_rows(event)
                continue
            if event.token >= 0:
                tokens.append(event.token)
            texts.append(self._output.add_token(event))
            if self._output.finish is not None:
                break
        first = len(self.prompt) + self.completion_tokens
        if tokens:
            self._meter.on_tokens(len(tokens), self._context.clock())
            self.completion_tokens += len(tokens)
        return self._output.make_chunk(texts, tokens, first)

    @property
    def hold_reason(self) -> str:
        """The reason why the session is held; empty while it is not."""
        view = self._context.backend.session(self._session)
        return "" if view is None else hide_identities(view.hold_reason)

    def acknowledge(self, chunk: OutputChunk) -> None:
        """Grant credit for more tokens or rows, because the client has this chunk (R7, credit)."""
        if self._output.finish is None and not self._closed:
            end = chunk.received
            if self._output.rows_end is not None and not self.completion_tokens:
                end = self._output.rows_end  # in the prompt
            self._stream.read_to(end)

    def abort(self, error: ApiError) -> None:
        """Make `next_chunk` raise `error` at once: the client disconnected, or the gateway stops."""
        if self._output.finish is None and not self._closed:
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
        keep = self._output.finish is not None or (self._refused and self._has_run())
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
        context.metrics.count_turn(self._request.model, outcome, self._output.finish)

    def _outcome(self) -> TurnOutcome:
        if self._output.finish is not None:
            return TurnOutcome.RECOVERED if self._stream.reroutes else TurnOutcome.COMPLETED
        if self._refused:
            return TurnOutcome.REFUSED
        left = (None, *CLIENT_ENDED, Code.SESSION_ELSEWHERE)  # the last: for another gateway
        return TurnOutcome.CANCELLED if self._failure in left else TurnOutcome.FAILED
