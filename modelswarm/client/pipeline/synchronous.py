"""`Pipeline`: the synchronous verbs over the asynchronous engine, which runs in a background thread.

Threads may share a pipeline, and the caller's thread may have a running event loop, as in Jupyter. Used through
`modelswarm.pipeline`. Starts no process: `opening.py` does.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, TypedDict, Unpack, overload

from modelswarm.client.api.answers import ServedModel
from modelswarm.client.api.errors import ClosedClientError
from modelswarm.client.api.loop_thread import LoopThread
from modelswarm.client.pipeline.engine import Job, PipelineEngine
from modelswarm.client.pipeline.errors import AnswerAbortedError, PipelineInterrupted
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.progress import progress_bar
from modelswarm.client.pipeline.prompts import (
    Message,
    Prompts,
    check_config,
    check_switches,
    configs_of,
    longest_first,
    parse_prompts,
    parse_texts,
    parse_turn,
)
from modelswarm.client.pipeline.response import Response
from modelswarm.client.pipeline.response_stream import ResponseStream, joined
from modelswarm.client.pipeline.runs import BatchRun, ScoreRun, StreamRun
from modelswarm.client.pipeline.session import Session
from modelswarm.errors import ModelSwarmError, UserError

if TYPE_CHECKING:
    from modelswarm.local.swarm import LocalSwarm

Configs = GenerationConfig | Sequence[GenerationConfig | None] | None


class InferOptions(TypedDict, total=False):
    """Options of `Pipeline.infer`, which explains them."""

    do_preprocess: bool | None
    adapter_name: str | None
    use_tqdm: bool
    raise_errors: bool
    truncate_prompt: bool
    done: Sequence[Response | None] | None


class Pipeline:
    """Answers prompts. Made by `modelswarm.pipeline`; use it by `with`, or call `close`."""

    def __init__(self, loop: LoopThread, engine: PipelineEngine, swarm: LocalSwarm | None) -> None:
        """`swarm`: a private one, which this pipeline stops."""
        self._loop, self._engine, self.swarm = loop, engine, swarm
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._pid = os.getpid()
        # Runs at `close`, when the pipeline is no longer used, or at the exit of the process.
        self._release = weakref.finalize(self, _release, loop, engine, swarm, self._pid)

    @property
    def model(self) -> ServedModel:
        """The served model, with its name and the positions of its context."""
        return self._engine.model

    @overload
    def infer(
        self, prompts: str, gen_config: Configs = None, **options: Unpack[InferOptions]
    ) -> Response: ...
    @overload
    def infer(
        self,
        prompts: list[Message] | list[int],
        gen_config: Configs = None,
        **options: Unpack[InferOptions],
    ) -> Response: ...
    @overload
    def infer(
        self,
        prompts: list[str] | list[list[Message]] | list[list[int]],
        gen_config: Configs = None,
        **options: Unpack[InferOptions],
    ) -> list[Response]: ...
    def infer(
        self,
        prompts: Any,
        gen_config: Configs = None,
        *,
        do_preprocess: bool | None = None,
        adapter_name: str | None = None,
        use_tqdm: bool = False,
        raise_errors: bool = True,
        truncate_prompt: bool = False,
        done: Sequence[Response | None] | None = None,
    ) -> Response | list[Response]:
        """Return the answer to one prompt, or those to a list, in its order. Lengths of a `Response` are tokens.

        `prompts`: a string, a list of messages, a list of token ids, or a list of these. `gen_config`: one for all, or
        one for each. `do_preprocess`: whether a string is a user's message of a chat; by default if the model has a
        chat template. `adapter_name`: a LoRA adapter that the swarm lists.
        `truncate_prompt` keeps the last tokens of a prompt that fit with its answer into the context.
        `done`: responses of an interrupted run with the same prompts, None where there is none. They are not asked for.

        The first error ends the other prompts, and is raised with a note about its prompt. With `raise_errors=False`
        each error is in `Response.error`, and the other prompts go on.
        UserError for a bad argument, before anything is sent. PipelineInterrupted on Ctrl-C.
        """
        check_switches(use_tqdm=use_tqdm, raise_errors=raise_errors)
        _check_forms(do_preprocess, truncate_prompt)
        parsed = parse_prompts(prompts)
        kept = _kept(done, len(parsed.items))
        model = self._find_model(adapter_name)
        jobs = self._jobs(parsed, gen_config, do_preprocess, truncate_prompt, model)
        with progress_bar(len(jobs), len(kept), use_tqdm) as advance:
            wanted = [job for job in jobs if job.index not in kept]
            run = BatchRun(self._engine, wanted, raises=raise_errors, on_done=advance)
            try:
                self._loop.call(run.run.execute())
            except KeyboardInterrupt:
                self._loop.call(run.run.wait_ended())
                responses = kept | run.responses
                raise PipelineInterrupted(list(map(responses.get, range(len(jobs))))) from None
            except ModelSwarmError as error:
                _add_note(error, run.run.failed_index, len(kept | run.responses), len(jobs))
                raise
        responses = kept | run.responses
        if len(responses) < len(jobs):
            raise AnswerAbortedError("the pipeline was closed before all prompts were answered")
        ordered = [responses[place] for place in range(len(jobs))]
        return ordered[0] if parsed.is_single else ordered

    __call__ = infer

    def stream_infer(
        self,
        prompts: Any,
        gen_config: Configs = None,
        *,
        do_preprocess: bool | None = None,
        adapter_name: str | None = None,
        stream_response: bool = True,
        raise_errors: bool = True,
        truncate_prompt: bool = False,
        done: Sequence[Response | None] | None = None,
        sessions: object = None,
    ) -> ResponseStream:
        """Iterate over the parts of all answers, mixed as they come; `index` is the place of a part's prompt.

        A part has what is new since the one before it; the last part of an answer has its finish reason. With
        `stream_response=False` each answer is one part. Other arguments and errors: see `infer`. An iterator that is
        left early ends its answers.

        `responses` of the iterator are the answers that are whole. With `done=responses` the same call goes on: it has
        only the parts of the other answers, from their beginnings. `sessions`: only None.
        """
        if sessions is not None:
            detail = "prompts of stream_infer have no sessions; use chat(prompt, session, stream_response=True)"
            raise UserError("sessions", detail)
        check_switches(stream_response=stream_response, raise_errors=raise_errors)
        _check_forms(do_preprocess, truncate_prompt)
        parsed = parse_prompts(prompts)
        kept = _kept(done, len(parsed.items))
        model = self._find_model(adapter_name)
        jobs = self._jobs(parsed, gen_config, do_preprocess, truncate_prompt, model)
        wanted = [job for job in jobs if job.index not in kept]
        run = StreamRun(self._engine, wanted, raises=raise_errors, whole=not stream_response)
        parts = self._parts(run, len(jobs))
        return ResponseStream(parts, partial(self._wait_ended, run), kept, len(jobs))

    def get_ppl(
        self, input_ids: list[int] | list[list[int]], *, adapter_name: str | None = None
    ) -> list[float]:
        """Return the mean negative log likelihood of each text of token ids, from its second token on.

        It is a natural logarithm, as LMDeploy's; `math.exp` of it is the perplexity.
        `input_ids`: at least two token ids, or a list of such lists. `adapter_name`: see `infer`.

        UserError for other forms, before anything is sent. ContextLengthError: a text does not fit.
        """
        texts = parse_texts(input_ids)
        jobs = self._jobs(texts, None, False, False, self._find_model(adapter_name))
        run = ScoreRun(self._engine, jobs)
        try:
            self._loop.call(run.run.execute())
        except ModelSwarmError as error:
            _add_note(error, run.run.failed_index, len(run.scores), len(jobs))
            raise
        if len(run.scores) < len(jobs):
            raise AnswerAbortedError("the pipeline was closed before all texts were scored")
        return [run.scores[place] for place in range(len(jobs))]

    def get_reward_score(self, input_ids: list[int] | list[list[int]]) -> NoReturn:
        """Raise UserError: no reward model is served."""
        detail = "servers run language models, which have no reward; get_ppl gives likelihoods"
        raise UserError("get_reward_score", detail)

    def session(self, gen_config: GenerationConfig | None = None) -> Session:
        """Return a new session for `chat`. `gen_config`: of its turns that have none."""
        self._check_open()
        check_config(gen_config)
        session = Session(gen_config, self._free_session)
        self._sessions.add(session)
        return session

    @overload
    def chat(
        self,
        prompt: str | list[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        adapter_name: str | None = None,
        stream_response: Literal[False] = False,
    ) -> Session: ...
    @overload
    def chat(
        self,
        prompt: str | list[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        adapter_name: str | None = None,
        stream_response: Literal[True],
    ) -> Iterator[Response]: ...
    def chat(
        self,
        prompt: str | list[Message],
        session: Session | None = None,
        gen_config: GenerationConfig | None = None,
        *,
        adapter_name: str | None = None,
        stream_response: bool = False,
    ) -> Session | Iterator[Response]:
        """Answer the next turn of a chat; return the session, whose `response` is the answer.

        With `stream_response` the parts of the answer are iterated over, and the session changes at their end. A turn
        that failed or was left early does not change the session.
        `adapter_name`: the LoRA adapter that answers this turn. Each has a context of its own at the servers.
        UserError if a turn of the session is running, if it is closed, or if the model cannot chat.
        """
        asked = parse_turn(prompt)
        check_switches(stream_response=stream_response)
        session = self.session() if session is None else session
        _check_session(session)
        session.check_open()
        config = session.gen_config if gen_config is None else gen_config
        check_config(config)
        model = self._find_model(adapter_name)
        self._jobs(
            parse_prompts(asked), config, True, False, model
        )  # raises before anything is sent
        parts = self._turn(session, prompt, asked, config, stream_response, model)
        if stream_response:
            return parts
        for _ in parts:
            pass
        return session

    def close(self) -> None:
        """End what runs, free the sessions, and stop a private swarm. May be called twice."""
        for session in list(self._sessions):
            if self._release.alive and os.getpid() == self._pid:
                session.close()
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- inside

    def _jobs(
        self,
        prompts: Prompts,
        gen_config: Configs,
        do_preprocess: bool | None,
        truncates: bool,
        model: ServedModel,
        session: Session | None = None,
    ) -> list[Job]:
        """Return the jobs, the longest first."""
        self._check_open()
        configs = configs_of(gen_config, len(prompts.items))
        for field in ("output_logits", "output_last_hidden_state"):
            if any(getattr(config, field) is not None for config in configs):
                self._engine.rows.connect(field)
        problem = model.chat_problem
        needs_chat = any(prompt.messages is not None for prompt in prompts.items)
        if problem is not None and (do_preprocess or needs_chat):
            field = "do_preprocess" if do_preprocess and not needs_chat else "prompts"
            raise UserError(field, f"{problem}; use strings, with do_preprocess=False")
        is_chat = problem is None if do_preprocess is None else do_preprocess
        return [
            Job(
                index,
                prompts.items[index],
                configs[index],
                secrets.randbits(63),
                is_chat,
                truncates,
                None if session is None else session.session_id,
                model,
            )
            for index in longest_first(prompts.items, configs)
        ]

    def _parts(self, run: StreamRun, count: int) -> Generator[Response, None, None]:
        try:
            while parts := self._next_parts(run, count):
                yield from parts
        finally:
            self._end(run)

    def _next_parts(self, run: StreamRun, count: int) -> list[Response]:
        if not run.has_begun or os.getpid() != self._pid:
            self._check_open()
        try:
            return self._loop.call(run.next_parts())
        except ClosedClientError as error:  # `close` in another thread
            raise AnswerAbortedError("the pipeline was closed before the answers' ends") from error
        except ModelSwarmError as error:
            _add_note(error, run.run.failed_index, run.run.ended_jobs, count)
            raise

    def _wait_ended(self, run: StreamRun) -> None:
        if self._release.alive:
            self._loop.call(run.run.wait_ended())

    def _end(self, run: StreamRun) -> None:
        """End a run without waiting: the garbage collector may call this in any thread."""
        if self._release.alive and os.getpid() == self._pid:
            self._engine.post(run.run.end)

    def _turn(
        self,
        session: Session,
        prompt: str | list[Message],
        asked: list[Message],
        config: GenerationConfig | None,
        stream_response: bool,
        model: ServedModel,
    ) -> Generator[Response, None, None]:
        """Run one turn of a session; add it when its last part has come."""
        seen: list[Response] = []
        with session.turn() as turn:
            transcript = [*session.messages, *asked]
            jobs = self._jobs(parse_prompts(transcript), config, True, False, model, session)
            run = StreamRun(self._engine, jobs, raises=True, whole=not stream_response)
            turn.on_abort(lambda: self._end(run), model.name)
            for part in self._parts(run, 1):
                seen.append(part)
                if part.finish_reason is not None:
                    session.add_turn(prompt, transcript, joined(seen))
                yield part

    def _find_model(self, adapter_name: str | None) -> ServedModel:
        self._check_open()
        if adapter_name is None:
            return self._engine.model
        if not isinstance(adapter_name, str):
            raise UserError("adapter_name", f"{adapter_name!r} is not allowed; allowed: a string")
        return self._loop.call(self._engine.find_adapter(adapter_name))

    def _free_session(self, session_id: str, model: str) -> None:
        if self._release.alive and os.getpid() == self._pid:
            self._loop.call(self._engine.free_session(session_id, model))

    def _check_open(self) -> None:
        if not self._release.alive:
            raise UserError("pipeline", "it is closed; make a new one")
        if os.getpid() != self._pid:
            raise UserError("pipeline", "it was made in another process; make one in this process")


def _release(loop: LoopThread, engine: PipelineEngine, swarm: LocalSwarm | None, pid: int) -> None:
    """Stop everything, in the process that made it. The garbage collector may call this in the loop's own thread."""
    if os.getpid() != pid:
        return
    if threading.get_ident() == engine.thread:
        threading.Thread(target=_release, args=(loop, engine, swarm, pid)).start()
        return
    loop.call(engine.close())
    loop.close()
    if swarm is not None:
        swarm.stop()


def _check_forms(do_preprocess: object, truncate_prompt: object) -> None:
    """Raise UserError for a switch of another type; `do_preprocess` may be None."""
    if do_preprocess is not None:
        check_switches(do_preprocess=do_preprocess)
    check_switches(truncate_prompt=truncate_prompt)


def _check_session(session: object) -> None:
    if not isinstance(session, Session):
        detail = "allowed: None, or a session of pipe.session()"
        raise UserError("session", f"a value of the type {type(session).__name__}; {detail}")


def _kept(done: Sequence[Response | None] | None, count: int) -> dict[int, Response]:
    """Return the responses of an earlier run that are answers. UserError if they are of another number of prompts."""
    if done is None:
        return {}
    is_list = isinstance(done, Sequence)
    if not is_list or not all(each is None or isinstance(each, Response) for each in done):
        detail = "allowed: None, or a list with a Response or None for each prompt"
        raise UserError("done", f"a value of the type {type(done).__name__}; {detail}")
    if len(done) != count:
        detail = f"{len(done)} responses for {count} prompts; allowed: those of the same prompts"
        raise UserError("done", detail)
    return {
        place: response
        for place, response in enumerate(done)
        if response is not None and response.error is None
    }


def _add_note(error: ModelSwarmError, index: int, done: int, count: int) -> None:
    if count > 1 and index >= 0:
        error.add_note(f"prompt {index} of {count} failed; {done} are done")
