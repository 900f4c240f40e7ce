"""The asynchronous engine of a pipeline: asks the gateway for the answers to prompts, a bounded number at a time.

A refusal for want of room, or a gateway that is being restarted, delays a prompt; it does not fail it. All methods run
in the loop of the pipeline's thread.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from modelswarm.client.answer_rows import AnswerRows
from modelswarm.client.api.answers import Chunk, Completion, ServedModel, TokenLogprob
from modelswarm.client.api.async_client import AsyncClient
from modelswarm.client.api.errors import (
    ApiError,
    ConflictError,
    ConnectionBrokenError,
    GoneError,
    RateLimitError,
    ServiceUnavailableError,
)
from modelswarm.client.pipeline.admission import Admission
from modelswarm.client.pipeline.generation_config import GenerationConfig, token_id_of
from modelswarm.client.pipeline.prompts import Prompt
from modelswarm.client.pipeline.response import Response
from modelswarm.errors import UnavailableError, UnreachableError, UserError

CONFLICT_SECONDS = 0.5  # until a session's last turn has ended
CLOSE_TRIES = 6
UNLIMITED = 1 << 30  # positions; the gateway ends an answer at the context's end
Part = TypeVar("Part")
_log = logging.getLogger(__name__)
# A lost session is begun anew: nothing of its answer was given to the caller, and its seed is the same.
_DELAYING = (
    RateLimitError,
    ServiceUnavailableError,
    ConnectionBrokenError,
    ConflictError,
    GoneError,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt that is to be answered."""

    index: int
    prompt: Prompt
    config: GenerationConfig
    seed: int  # of its sampling, if the config has none; a repeated request gets the same answer
    is_chat: bool = False  # its text is a user's message; messages are always a chat
    truncates: bool = False  # keeps the last tokens that fit, with the answer, into the context
    session_id: str | None = None
    model: ServedModel | None = None  # an adapter; None: the model of the pipeline


class PipelineEngine:
    """`progress_timeout`: seconds without an answer to any prompt after which a delayed prompt fails."""

    def __init__(
        self,
        client: AsyncClient,
        model: ServedModel,
        most: int,
        progress_timeout: float,
        rows: AnswerRows,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Call it in the loop. `most`: prompts that run at a time."""
        self.model, self.most, self.rows = model, most, rows
        self.thread = threading.get_ident()  # of the loop
        self._loop = asyncio.get_running_loop()
        self._client, self._progress_timeout, self._clock = client, progress_timeout, clock
        self._admission = Admission(most)
        self._last_progress = clock()
        self._adapters: dict[str, ServedModel] = {}
        self._runs: set[Callable[[], object]] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def post(self, function: Callable[[], object]) -> None:
        """Call a function in the loop, soon, from any thread."""
        self._loop.call_soon_threadsafe(function)

    @contextmanager
    def hold(self, end: Callable[[], object]) -> Iterator[None]:
        """Register a run while it goes on; `close` calls `end`, and waits."""
        self._runs.add(end)
        self._idle.clear()
        try:
            yield
        finally:
            self._runs.discard(end)
            if not self._runs:
                self._idle.set()

    async def answer(self, job: Job) -> Response:
        """Return the whole answer. Raise ApiError."""
        return await _only(self._attempts(job, self._ask))

    def stream(self, job: Job) -> AsyncGenerator[Response, None]:
        """Yield the parts of the answer; the last one has a finish reason. Raise ApiError."""
        return self._attempts(job, self._stream)

    async def score(self, job: Job) -> float:
        """Return the mean negative log likelihood of a prompt of token ids. Raise ApiError."""
        return await _only(self._attempts(job, self._score))

    async def find_adapter(self, name: str) -> ServedModel:
        """Return a LoRA adapter of the model. Raise UserError if the gateway lists no such one."""
        base = self.model.parent or self.model.name
        if name not in self._adapters:
            listed = await self._client.models()
            self._adapters = {each.name: each for each in listed if each.parent == base}
        if name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "None, the swarm lists no adapters"
            raise UserError("adapter_name", f"{name!r} is not one of {base}; allowed: {known}")
        return self._adapters[name]

    async def free_session(self, session_id: str, model: str) -> None:
        """Free a named session, if it is held. A gateway that cannot do it now drops it when it has been idle.

        `model`: that of the session, maybe an adapter.
        """
        for _ in range(CLOSE_TRIES):
            try:
                await self._client.close_session(session_id, model=model)
                return
            except ConflictError:  # its gateway does not know yet that the stream was left
                await asyncio.sleep(CONFLICT_SECONDS)
            except ApiError as error:
                _log.debug("session %s is not closed: %s", session_id, error)
                return

    async def close(self) -> None:
        """End all runs, and close the connections."""
        for end in tuple(self._runs):
            end()
        await self._idle.wait()
        await self._client.aclose()
        self.rows.close()

    async def _attempts(
        self, job: Job, attempt: Callable[[Job], AsyncGenerator[Part, None]]
    ) -> AsyncGenerator[Part, None]:
        """Run an attempt until one begins; errors after that are final, because the client resumes by itself."""
        began = self._clock()
        while True:
            await self._admission.enter()
            has_begun = False
            try:
                async with aclosing(attempt(job)) as parts:
                    async for part in parts:
                        has_begun, self._last_progress = True, self._clock()
                        yield part
                self._admission.raise_limit()
                return
            except _DELAYING as error:
                since = max(began, self._last_progress)
                if has_begun or self._clock() - since > self._progress_timeout:
                    raise
                if isinstance(error, RateLimitError):
                    self._admission.lower_limit()
                pause = _pause_after(error)
            finally:
                self._admission.leave()
            await asyncio.sleep(pause)

    async def _ask(self, job: Job) -> AsyncGenerator[Response, None]:
        prompt, fields = await self._request(job)
        completion = await self._client.complete(prompt, **fields)
        read = completion.choices[0].prompt_token_ids or ()
        response = _whole_response(job.index, completion)
        yield await self._add_rows(job, response, read, response.token_ids)

    async def _stream(self, job: Job) -> AsyncGenerator[Response, None]:
        prompt, fields = await self._request(job)
        count, length, cached, final = 0, 0, 0, Chunk()
        read: tuple[int, ...] = ()
        tokens: list[int] = []
        stream = self._client.stream_complete(prompt, **fields)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                count += len(chunk.token_ids)
                tokens += chunk.token_ids
                read = chunk.prompt_token_ids or read
                length = len(read)
                if chunk.usage is not None:
                    count, length = chunk.usage.completion_tokens, chunk.usage.prompt_tokens
                    cached = chunk.usage.cached_tokens or 0
                elif chunk.finish_reason is not None:
                    final = chunk
                elif chunk.text or chunk.token_ids:
                    yield _part(job.index, chunk, count, length)
        last = _part(job.index, final, count, length, cached)
        yield await self._add_rows(job, last, read, tokens)

    async def _add_rows(
        self, job: Job, response: Response, prompt: Sequence[int], answer: Sequence[int]
    ) -> Response:
        """Return the last response of an answer with the rows that its config asks for."""
        wanted = job.config.wanted_rows
        if wanted.is_empty or not answer:
            return response
        model, began = (job.model or self.model).name, self._clock()
        while True:
            try:
                logits, states = await asyncio.to_thread(
                    self.rows.read, model, prompt, answer, wanted
                )
                return replace(response, logits=logits, last_hidden_state=states)
            except (UnavailableError, UnreachableError) as error:
                if self._clock() - began > self._progress_timeout:
                    raise
                pause = getattr(error, "retry_after", CONFLICT_SECONDS)
            await asyncio.sleep(pause)

    async def _score(self, job: Job) -> AsyncGenerator[float, None]:
        assert job.prompt.token_ids is not None
        ids, model = job.prompt.token_ids, job.model or self.model
        # max_tokens 0: a prompt that fills the whole context leaves no position for an answer.
        completion = await self._client.complete(
            ids, model=model.name, max_tokens=0, prompt_logprobs=0
        )
        entries = completion.choices[0].prompt_logprobs or ()
        found = [entry[str(token)] for token, entry in zip(ids, entries, strict=True) if entry]
        yield -sum(each["logprob"] for each in found) / len(found)

    async def _request(self, job: Job) -> tuple[str | Sequence[int], dict[str, Any]]:
        """Return the prompt as it is sent, and the request's fields. A chat is sent as the tokens of its template."""
        model = job.model or self.model
        given: str | Sequence[int] | None = job.prompt.text
        messages = job.prompt.messages
        if job.prompt.token_ids is not None:
            given = job.prompt.token_ids
        elif messages is None and job.is_chat:
            messages = ({"role": "user", "content": job.prompt.text},)
        limit = model.max_length
        if messages is not None:
            found = await self._client.tokenize(messages, model=model.name)
            given, limit = found.token_ids, found.max_length
        assert given is not None
        room = UNLIMITED
        if job.truncates and job.config.max_new_tokens is None and limit is not None:
            room = max(1, limit - await self._count(given, model.name))
        fields = job.config.request_fields(room, job.seed) | {"model": model.name}
        if job.truncates:
            fields["truncate_prompt_tokens"] = -1
        if job.session_id is not None:
            fields["session_id"] = job.session_id
        return given, fields

    async def _count(self, prompt: str | Sequence[int], model: str) -> int:
        if not isinstance(prompt, str):
            return len(prompt)
        return len((await self._client.tokenize(prompt, model=model)).token_ids)


async def _only(parts: AsyncGenerator[Part, None]) -> Part:
    """Read the attempts to their end, behind which the limit of prompts is raised; return their only part."""
    async with aclosing(parts):
        [part] = [each async for each in parts]
        return part


def _pause_after(error: ApiError) -> float:
    if isinstance(error, RateLimitError | ServiceUnavailableError):
        return error.retry_after
    return CONFLICT_SECONDS


def _whole_response(index: int, completion: Completion) -> Response:
    usage = completion.usage
    return Response(
        text=completion.text,
        generate_token_len=usage.completion_tokens,
        input_token_len=usage.prompt_tokens,
        finish_reason=completion.finish_reason,
        token_ids=list(completion.token_ids or ()),
        logprobs=_logprobs(completion.logprobs),
        index=index,
        cached_tokens=usage.cached_tokens or 0,
    )


def _part(index: int, chunk: Chunk, count: int, length: int, cached: int = 0) -> Response:
    return Response(
        text=chunk.text,
        generate_token_len=count,
        input_token_len=length,
        finish_reason=chunk.finish_reason,
        token_ids=list(chunk.token_ids),
        logprobs=_logprobs(chunk.logprobs or None),
        index=index,
        cached_tokens=cached,
    )


def _logprobs(entries: Sequence[TokenLogprob] | None) -> list[dict[int, float]] | None:
    """Return one mapping for each token, with the alternatives and the token itself."""
    if entries is None:
        return None
    return [
        {token_id_of(name): value for name, value in _named(entry).items()} for entry in entries
    ]


def _named(entry: TokenLogprob) -> Mapping[str, float]:
    own = {} if entry.logprob is None else {entry.token: entry.logprob}
    return {**entry.top, **own}
