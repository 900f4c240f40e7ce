"""Starts generations: finds the model, encodes the prompt, applies defaults and limits, and tracks what runs.

Used by both APIs. Knows the backend only as the contract in `backend/protocol.py`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from modelswarm.protocol.messages import Sampling
from modelswarm_gateway.backend.beams.checks import check_beams
from modelswarm_gateway.backend.beams.search import BeamSearch
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.protocol import SessionBackend
from modelswarm_gateway.core.interface.errors import PromptTooLong
from modelswarm_gateway.core.interface.row_sizes import RowSizes
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn, Reservation, TurnRequest
from modelswarm_gateway.errors import (
    ApiError,
    Code,
    from_core,
    gateway_stopping,
    invalid_field,
    invalid_request,
    model_not_found,
    stream_replaced,
    stream_unread,
)
from modelswarm_gateway.generation.continuation import (
    append_to_log,
    appended_prompt,
    check_tokenizer,
    session_exists,
    session_expired,
)
from modelswarm_gateway.generation.generation import Generation, GenerationContext, TurnStart
from modelswarm_gateway.generation.grammar.check_process import GrammarProcess
from modelswarm_gateway.generation.grammar.request_grammar import (
    request_grammar,
    with_forced_tokens,
)
from modelswarm_gateway.generation.grammar.source import GrammarSource
from modelswarm_gateway.generation.named_sessions import NamedSessions, SessionKey, wire_name
from modelswarm_gateway.generation.request import (
    ChatPrompt,
    GenerationRequest,
    TokenPrompt,
    check_prompt_scores,
    encode_prompt,
    fit_to_model,
    prompt_scores,
    token_limit,
)
from modelswarm_gateway.generation.resumption import ResumedTurn, resume_turn
from modelswarm_gateway.generation.rows.block_ranges import check_same_blocks, row_sizes
from modelswarm_gateway.generation.rows.opaque_rows import add_opaque, check_input_rows
from modelswarm_gateway.generation.rows.returned_rows import RowsBuffer, check_rows, with_rows
from modelswarm_gateway.generation.session_locator import SessionLocator
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.models.sampling_defaults import SamplingOptions
from modelswarm_gateway.models.sampling_tokens import add_bad_words
from modelswarm_gateway.models.tokenizer import UNKNOWN_LIMIT, ModelTokenizer, longest_text
from modelswarm_gateway.settings import cap_keepalive

# Refusal of a grammar at a model whose servers all lack the library.
NO_GRAMMARS = (
    "no server of this model can hold an answer to a grammar; leave it out, or use another model"
)
# Pause between two looks for a tokenizer that is being loaded, in seconds.
TOKENIZER_POLL_SECONDS = 0.1
# Most requests that wait for a tokenizer; others are refused, so that they leave room for those of other models.
MAX_WAITING = 256
# Longest wait for a generation whose client has left, in seconds.
RELEASE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    credit_ahead: int = 32  # tokens generated ahead of the client
    max_named_sessions: int = 1000
    idle_seconds: float = 600.0  # after which an unused named session is dropped
    keepalive_seconds: float = 5.0  # silence after which a client is sent a keepalive
    max_generations: int = 4096  # at a time
    unread_seconds: float = 120.0  # after which a turn ends whose client takes nothing
    tokenizer_seconds: float = (
        10.0  # for which a request waits while its model's tokenizer is loaded
    )
    tool_call_parser: str = ""  # a family of tool calls; "": that of the model's chat template


@dataclass(frozen=True, slots=True)
class _SessionTurn:
    """A turn, and what is known of its session; `kept`: the turn before it."""

    turn: TurnRequest
    epoch_floor: int = 0
    kept: ParkedTurn | None = None
    resumed: ResumedTurn | None = None
    position: int | None = None  # where appended input begins


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
        self._grammars = GrammarProcess()
        self.accepting = True
        self.shutting_down = False  # clients are sent elsewhere; new requests are still served
        self._last_request_at = clock()
        self._running: set[Generation] = set()
        self._forwarded: set[asyncio.Future[None]] = set()  # answers of other gateways
        self._waiting = 0  # requests whose model's tokenizer is loaded
        self._starting = 0  # requests whose prompt is tokenized, or whose session is searched for
        self._ended = asyncio.Event()  # a generation has ended or started

    def keepalive_seconds(self, model: str) -> float:
        """Return the silence after which a client of that model is sent a keepalive."""
        hold = self.backend.hold_limit(model)
        return cap_keepalive(self.settings.keepalive_seconds, hold)

    @property
    def running_count(self) -> int:
        return len(self._running)

    def abort_all(self) -> None:
        """End every running turn, and every forwarded answer, with an error: the gateway is stopping."""
        for generation in tuple(self._running):
            generation.abort(gateway_stopping())
        for stopping in self._forwarded:
            if not stopping.done():
                stopping.set_result(None)

    @contextmanager
    def forwarding(self) -> Iterator[asyncio.Future[None]]:
        """Count an answer that another gateway gives. Yield a future, which is done once the answer must end."""
        stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forwarded.add(stopping)
        try:
            yield stopping
        finally:
            self._forwarded.discard(stopping)
            self._ended.set()

    async def start_generation(self, request: GenerationRequest) -> Generation:
        """Start one generation; the caller must `close` it. Raise ApiError or OwnedElsewhere."""
        self._last_request_at = requested_at = self.clock()
        here = (
            request.forwarded
            and request.session_id
            and self.named_sessions.has_session((request.model, request.session_id))
        )
        if not self.accepting and not here:  # only this gateway can answer for a session kept here
            raise gateway_stopping()
        if len(self._running) + self._starting >= self.settings.max_generations:
            detail = f"{self.settings.max_generations} requests are running already; retry in 1 s"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        self._starting += 1
        try:
            generation = await self._start(request, requested_at)
            self._running.add(generation)
        finally:
            self._starting -= 1
            self._ended.set()
        return generation

    def start_choices(self, generations: list[Generation], count: int) -> None:
        """Add generations with the prompt of the first one until there are `count`. The caller must close all."""
        if len(self._running) + count - 1 > self.settings.max_generations:
            detail = f"{self.settings.max_generations} requests are running already; retry in 1 s"
            raise ApiError(Code.NO_CAPACITY, detail, retry_after=1.0)
        first = generations[0]
        self._check_prompt_scores(first.prompt, first.sampling, count - len(generations))
        for choice in range(len(generations), count):
            generation = first.start_choice(choice)
            self._running.add(generation)
            generations.append(generation)

    async def count_prompt(self, request: GenerationRequest) -> int:
        """Return the tokens of the request's prompt. Raise ApiError."""
        card, tokenizer = await self.wait_for_model(request.model)
        request, _ = fit_to_model(request, tokenizer, self.settings.tool_call_parser)
        return len(await encode_prompt(request, tokenizer, longest_text(card.max_length)))

    async def _start(self, request: GenerationRequest, requested_at: float) -> Generation:
        card, tokenizer = await self.wait_for_model(request.model)
        request, form = fit_to_model(request, tokenizer, self.settings.tool_call_parser)
        sizes = row_sizes(request, card)
        check_rows(request.rows, sizes)
        check_input_rows(request, card, sizes, self.backend.opaque_bytes)
        tokens = await encode_prompt(request, tokenizer, card.max_length)
        sampling = tokenizer.defaults.sampling(request.options, secrets.randbits(64))
        sampling = await add_bad_words(sampling, request.options, tokenizer)
        source = request_grammar(request, form, tokenizer, tokens)
        if source is not None:
            sampling = await self._constrain(sampling, source, card, request)
        turn = TurnRequest(
            tokens=tokens,
            max_tokens=token_limit(request, tokenizer),
            sampling=sampling,
            credit_ahead=self.settings.credit_ahead,
            keeps_logprobs=request.options.logprobs is not None,
            tokenizer=tokenizer.digest,
        )
        session = _SessionTurn(turn)
        if request.session_id is not None:
            encode = partial(encode_prompt, text=tokenizer, limit=card.max_length)
            session = await self._turn_of_session(request, turn, encode)
        turn, position, resumed = session.turn, session.position, session.resumed
        if resumed is None:
            turn = add_opaque(turn, request, sizes.hidden_bytes, position or 0, session.kept)
        turn, rows = _add_rows(turn, request, sizes, position)
        self._check_not_replaced(request.model, turn.tokenizer)
        self._check_prompt_scores(turn.tokens, turn.sampling, 1, request.echo and request.streams)
        floor = session.epoch_floor
        begin = TurnStart(turn, tokenizer, requested_at, floor, resumed, position, form, rows)
        return Generation(self._context_of(request, card, begin.turn), request, begin)

    async def _turn_of_session(
        self,
        request: GenerationRequest,
        turn: TurnRequest,
        encode: Callable[[GenerationRequest], Awaitable[tuple[int, ...]]],
    ) -> _SessionTurn:
        """Return the turn with the log of its named session, which this gateway owns from now on. Raise ApiError."""
        key = (request.model, request.session_id or "")
        check = partial(_resume, request, turn)
        if request.resume_after is not None and self.named_sessions.is_busy(key):
            check(self._parked_turn(key))  # only a client that has the log may end its stream
            self._replace_stream(key)
        epoch_floor = await self._locator.acquire(request, key, check)
        if request.resume_after is not None and self.named_sessions.is_busy(key):
            raise self.named_sessions.busy_error(key)
        kept = self._parked_turn(key)
        check_same_blocks(request, kept)
        found = _SessionTurn(turn, epoch_floor, kept, check(kept))
        if found.resumed is not None:
            return replace(found, turn=replace(turn, tokens=found.resumed.prompt))
        if request.reservation is not None or request.parent_id is not None:
            return replace(found, turn=self._opened_turn(turn, key, request))
        if not request.append:
            return found
        tokens = turn.tokens
        if kept is not None and (kept.is_empty or request.position == 0):
            tokens = await encode(replace(request, append=False))
            if self._parked_turn(key) != kept:
                raise self.named_sessions.busy_error(key)
            kept = replace(kept, tokens=())
        is_chat = isinstance(request.prompt, ChatPrompt)
        whole = append_to_log(kept, tokens, request.position, turn.tokenizer, is_chat=is_chat)
        position = len(kept.tokens) if kept else 0
        position = position if request.position is None else request.position
        return replace(found, turn=replace(turn, tokens=whole), kept=kept, position=position)

    async def _constrain(
        self,
        sampling: Sampling,
        source: GrammarSource,
        card: ModelCard,
        request: GenerationRequest,
    ) -> Sampling:
        """Return the sampling held to a grammar. Raise ApiError."""
        if not card.can_constrain:
            raise invalid_request(source.param, f"{source.param}: {NO_GRAMMARS}")
        grammar = await self._grammars.check(source, sampling.eos)
        return replace(sampling, grammar=with_forced_tokens(grammar, request))

    def _check_not_replaced(self, model: str, tokenizer: str) -> None:
        """Raise ApiError if turns run on another tokenizer since the prompt was read by the one of this digest."""
        card = self.backend.model_card(model)
        present = None if card is None else card.tokenizer
        if present is not None and present.digest != tokenizer:
            detail = f"the tokenizer of {model!r} was just replaced; repeat the request in 1 s"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)

    def _context_of(
        self, request: GenerationRequest, card: ModelCard, turn: TurnRequest
    ) -> GenerationContext:
        """Return what a generation runs on: the servers, or a beam search on them. Raise ApiError."""
        if request.beams is None:
            return self._context
        check_beams(request.beams, turn.sampling)
        prompt, limit = len(turn.tokens), card.max_length
        if 0 < limit <= prompt:
            raise from_core(PromptTooLong(prompt, limit), request.prompt_field)
        if turn.max_tokens is None and not limit:
            detail = "a beam search has an end; the context of this model is not known"
            raise invalid_field("max_tokens", detail)
        longest = min(limit or UNKNOWN_LIMIT, prompt + (turn.max_tokens or limit))
        search = BeamSearch(self.backend, request.beams, longest, request.prompt_field)
        return replace(self._context, backend=search)

    def _check_prompt_scores(
        self, prompt: Sequence[int], sampling: Sampling, count: int, in_event: bool = False
    ) -> None:
        """Raise ApiError if `count` more answers have too many log probabilities of the prompt."""
        wanted = count * prompt_scores(prompt, sampling)
        running = self._running if wanted else ()
        kept = sum(prompt_scores(each.prompt, each.sampling) for each in running)
        check_prompt_scores(wanted, kept, in_event=in_event)

    async def locate_session(self, key: SessionKey) -> None:
        """Take a session over whose gateway was lost; one that is kept here, or is nowhere, stays as it is.

        Raise ApiError, or OwnedElsewhere.
        """
        if not self.accepting:
            raise gateway_stopping()
        await self.wait_for_model(key[0])
        nothing = GenerationRequest(
            key[0], TokenPrompt(()), "session_id", SamplingOptions(), session_id=key[1], append=True
        )
        await self._locator.acquire(nothing, key, lambda _: None)

    async def find_session(self, key: SessionKey) -> SessionLocation:
        """Return what the servers know of a session that is not kept here. Raise ApiError."""
        return await self._locator.find(key)

    async def is_owned_by(self, request: GenerationRequest, target: str) -> bool | None:
        """Return whether the gateway at `target` still owns the session of a named request; None if the servers know
        of no running owner."""
        assert request.session_id is not None
        name = wire_name((request.model, request.session_id))
        location = await self.backend.find_session(name, request.model)
        return target in location.owner_target.split(",") if location.is_owner_alive else None

    def _parked_turn(self, key: SessionKey) -> ParkedTurn | None:
        """Return the log and the last turn of a session that is kept here; None if there is none."""
        sessions = self.named_sessions
        is_here = sessions.has_session(key)
        return self.backend.parked_turn(sessions.session_name(key)) if is_here else None

    def _opened_turn(
        self, turn: TurnRequest, key: SessionKey, request: GenerationRequest
    ) -> TurnRequest:
        """Return the first turn of a session that is opened. A fork has the reservation of its parent."""
        if self.named_sessions.has_session(key):
            raise session_exists()
        if request.parent_id is None:
            return replace(turn, reservation=request.reservation, begin=0)
        parent = (key[0], request.parent_id)
        kept = self._parked_turn(parent)
        if kept is None:
            raise session_expired()
        check_tokenizer(kept, turn.tokenizer)
        whole = Reservation(kept.turn.session_length, kept.turn.session_ttl, kept.turn.blocks)
        name = self.named_sessions.session_name(parent)
        return replace(turn, parent=name, reservation=whole if whole.max_length else None)

    def _replace_stream(self, key: SessionKey) -> None:
        """End a generation of this session with an error, which its client receives if it still reads."""
        for generation in tuple(self._running):
            if generation.session_key == key:
                generation.end(stream_replaced())

    def end_unread(self) -> None:
        """End the turns whose clients take nothing, because they hold KV. Call it periodically."""
        since = self.clock() - self.settings.unread_seconds
        for generation in tuple(self._running):
            if generation.is_unread_since(since):
                generation.end(stream_unread(self.settings.unread_seconds))

    async def await_turn_end(self, key: SessionKey) -> None:
        """Wait for the end of the session's turn, for RELEASE_SECONDS at most."""
        until = self.clock() + RELEASE_SECONDS
        while self.named_sessions.is_busy(key) and self.clock() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    def _on_closed(self, generation: Generation) -> None:
        self._running.discard(generation)
        self._ended.set()

    async def wait_for_no_requests(self, seconds: float, until: float) -> bool:
        """Return True once no request arrived for `seconds`, counted from now; False if requests arrive at `until`."""
        since = self.clock()
        while (now := self.clock()) < until:
            quiet_at = max(since, self._last_request_at) + seconds
            if quiet_at <= now:
                return True
            await asyncio.sleep(min(until, quiet_at) - now)
        return False

    async def wait_until_idle(self, seconds: float) -> bool:
        """Return True once no generation runs, starts or is forwarded; False if one still does after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while self._running or self._starting or self._forwarded:
                    self._ended.clear()
                    await self._ended.wait()
        except TimeoutError:
            return False
        return True

    async def wait_for_model(self, name: str) -> tuple[ModelCard, ModelTokenizer]:
        """Return the model and its tokenizer, once that is loaded. Raise ApiError as `find_model` does.

        In a rollout of another tokenizer, the old servers may be gone before a gateway has loaded the new one.
        """
        if self._waiting < MAX_WAITING and self._is_loading(name):
            self._waiting += 1
            try:
                await self._wait_while_loading(name)
            finally:
                self._waiting -= 1
            if not self.accepting:
                raise gateway_stopping()
        return self.find_model(name)

    async def _wait_while_loading(self, name: str) -> None:
        end = self.clock() + self.settings.tokenizer_seconds
        while self.clock() < end and self.accepting and self._is_loading(name):  # noqa: ASYNC110
            await asyncio.sleep(TOKENIZER_POLL_SECONDS)

    def _is_loading(self, name: str) -> bool:
        card = self.backend.model_card(name)
        return card is not None and card.is_loading_tokenizer

    def find_model(self, name: str) -> tuple[ModelCard, ModelTokenizer]:
        """Return the model and its tokenizer. Raise ApiError if it is not served, or is starting."""
        card = self.find_card(name)
        if card.tokenizer is None:
            detail = f"the model {name!r} is starting: {card.tokenizer_reason}; retry in 1 s"
            raise ApiError(Code.NO_SERVERS, detail, param="model", retry_after=1.0)
        return card, card.tokenizer

    def find_card(self, name: str) -> ModelCard:
        """Return the model. Raise ApiError if it is not served, or if servers may still be discovered that serve it."""
        card = self.backend.model_card(name)
        if card is not None:
            return card
        self.check_discovery("model")
        raise model_not_found(name)

    def check_discovery(self, param: str) -> None:
        """Raise ApiError if servers may still be discovered: what is not found may exist."""
        if not self.backend.is_discovery_complete():
            detail = "the gateway is still discovering models; retry in 1 s"
            raise ApiError(Code.NO_SERVERS, detail, param=param, retry_after=1.0)


def _add_rows(
    turn: TurnRequest, request: GenerationRequest, sizes: RowSizes, position: int | None
) -> tuple[TurnRequest, RowsBuffer | None]:
    """Return the turn with the rows that the request asks for. `position`: where appended input begins.

    Raise ApiError.
    """
    wanted = request.rows
    if wanted is None:
        return turn, None
    start, end = (position or 0) if wanted.all_positions else len(turn.tokens) - 1, len(turn.tokens)
    if request.resume_after is not None:
        start = request.resume_after  # the row that leads to the next token
        end = start + 1
    return with_rows(turn, wanted, sizes, start, end)


def _resume(
    request: GenerationRequest, turn: TurnRequest, kept: ParkedTurn | None
) -> ResumedTurn | None:
    """Return the turn that the request resumes, None for a new turn. Raise ApiError if `kept` does not suit it."""
    if request.resume_after is None:
        request.check_last_turn(kept)
        return None
    prompt = turn.tokens
    if kept is not None:
        check_tokenizer(kept, turn.tokenizer)
    if request.append:
        prompt = appended_prompt(kept, prompt)
    needs_logprobs = request.options.logprobs is not None
    after, mark, needs_rows = request.resume_after, request.resume_mark, request.rows is not None
    return resume_turn(prompt, kept, after, mark, needs_logprobs, needs_rows)
