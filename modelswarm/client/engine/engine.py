"""`Engine`: the verbs of small inference programs, on a running swarm or on a private one.

Texts come from a `Pipeline`, contexts by hand from `InferenceSession`s over gRPC. Needs no torch itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import cached_property
from typing import Any, Self, Unpack

from modelswarm.client.api import Client
from modelswarm.client.engine.options import (
    GenerateOptions,
    Prompt,
    check_names,
    check_prompts,
    parse_options,
)
from modelswarm.client.pipeline.opening import PipelineOptions, pipeline
from modelswarm.client.pipeline.response import Response
from modelswarm.client.pipeline.response_stream import ResponseStream
from modelswarm.client.sessions.connection import Connection, connect_to
from modelswarm.client.sessions.session import GatewaySession
from modelswarm.errors import UserError


class Engine:
    """A model on a swarm. Use it by `with`, or call `close`. Threads may share it."""

    def __init__(
        self, model_path: str, *, gateway: str | None = None, **options: Unpack[PipelineOptions]
    ) -> None:
        """Connect to the gateway at a URL, or start a private swarm of a model, which ends with the engine.

        `model_path`: a gateway's URL; or a folder of a model, owner/name of a hub, demo://counting.
        `gateway`: the gRPC port of the gateway at the URL, for sessions; by default it is asked for its port.
        `options`: those of `modelswarm.pipeline`.

        UserError names a bad argument. UnreachableError: no gateway answers. UnavailableError: it serves no model.
        """
        is_url = str(model_path).startswith(("http://", "https://"))
        if gateway is not None and not is_url:
            raise UserError("gateway", "it has an effect only with a gateway's URL; leave it out")
        self._pipe = pipeline(model_path, **options)
        swarm = self._pipe.swarm
        self._url = model_path if swarm is None else f"http://{swarm.http}"
        self._gateway = gateway if swarm is None else swarm.grpc
        self._client = Client(self._url, api_key=options.get("api_key"))
        self._sessions: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_closed = False

    @property
    def model(self) -> str:
        """The name under which the model is served."""
        return self._pipe.model.name

    @property
    def max_length(self) -> int | None:
        """Positions of the context, prompt and answer together; None: not known yet."""
        return self._pipe.model.max_length

    @property
    def vocab_size(self) -> int | None:
        """The number that all token ids are below; None: not known yet."""
        return self._pipe.model.vocab_size

    # ---- tokens

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, as a prompt has them. UserError for another type."""
        if not isinstance(text, str):
            raise UserError("text", f"{text!r} is not allowed; allowed: a string")
        return list(self._client.tokenize(text, model=self.model).token_ids)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._client.detokenize(token_ids, model=self.model)

    # ---- texts

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> str:
        """Return the continuation of a text, or of token ids, without the prompt.

        `max_new_tokens`: at most so many (64).
        `do_sample`: draw tokens; otherwise the most probable one is taken (False).
        `temperature` (1.0), `top_k` (0: off), `top_p` (1.0): only with `do_sample`.
        `seed`: of its draws; without them an answer is the same with any.
        `stop_on_eos`: end at the model's end token (True).
        `truncate_prompt`: leave out the oldest tokens of a prompt that does not fit with its answer (False).

        UserError names a bad argument. ContextLengthError: the prompt does not fit.
        """
        return self.generate_batch([prompt], **options)[0]

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        done: Sequence[Response | None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[str]:
        """Return the continuation of each prompt, in their order. Options and errors: see `generate`.

        `done`: `responses` of the PipelineInterrupted that Ctrl-C raises. The same call goes on from there.
        """
        check_names(options)
        config, truncates = parse_options(**options)
        given: Any = check_prompts(prompts, self.vocab_size)
        answers: Any = self._pipe.infer(
            given, config, do_preprocess=False, truncate_prompt=truncates, done=done
        )
        return [answer.text for answer in answers]

    def stream_generate(
        self, prompt: Prompt, **options: Unpack[GenerateOptions]
    ) -> Generator[str, None, None]:
        """Iterate over the pieces of the continuation as they come. Together they are the text of `generate`.

        An iterator that is left early ends its answer.
        """
        return _first_texts(self.stream_generate_batch([prompt], **options))

    def stream_generate_batch(
        self,
        prompts: Sequence[Prompt],
        *,
        done: Sequence[Response | None] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generator[list[str], None, None]:
        """Iterate over lists with the new piece of each prompt's continuation; "" for a prompt without a new one.

        `done`: as for `generate_batch`; the prompts whose answers it has get no pieces.
        """
        check_names(options)
        config, truncates = parse_options(**options)
        given = check_prompts(prompts, self.vocab_size)
        parts = self._pipe.stream_infer(
            given, config, do_preprocess=False, truncate_prompt=truncates, done=done
        )
        return _pieces(parts, len(given))

    # ---- contexts by hand

    def open_row(self, max_length: int, ttl: int | None = None) -> GatewaySession:
        """Open one context of `max_length` positions for an `InferenceSession`. Raise NoCapacityError without room."""
        if self._is_closed:
            raise UserError("engine", "it is closed; make a new one")
        return GatewaySession(self._connection, self.model, max_length, ttl=ttl)

    def adopt_session(self, session: AbstractContextManager[Any]) -> None:
        """Close a session with the engine, if it is still open then."""
        self._sessions.add(session)

    @cached_property
    def _connection(self) -> Connection:
        if self._gateway is not None:
            return Connection(self._gateway)
        return connect_to(self._url, "gateway", "give the address as gateway=")

    def close(self) -> None:
        """Close the sessions and end what runs; stop a private swarm. May be called twice."""
        self._is_closed = True
        # The last one is called first. A session that another thread uses must not keep a swarm running.
        with ExitStack() as closings:
            closings.callback(self._pipe.close)
            closings.callback(self._client.close)
            if "_connection" in vars(self):
                closings.callback(self._connection.close)
            for session in list(self._sessions):
                closings.callback(session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _pieces(parts: ResponseStream, count: int) -> Generator[list[str], None, None]:
    """Yield the text of each part at its prompt's place. Leaving it ends the answers."""
    with closing(parts):
        for part in parts:
            if part.text:
                yield [part.text if place == part.index else "" for place in range(count)]


def _first_texts(stream: Generator[list[str], None, None]) -> Generator[str, None, None]:
    with closing(stream):
        for pieces in stream:
            yield pieces[0]
