"""Streams of token ids through a gateway's gRPC API.

Used by tests that kill processes or compare answers with a reference. Knows no processes: see `swarm.py`.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import grpc

from modelswarm.protocol.messages import Sampling
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

TOY_MODEL = "toy"  # served name
ANSWER_SECONDS = 400.0  # seconds: limit of one answer on a busy machine


@dataclass(frozen=True, slots=True)
class Request:
    """One request. It runs to `new` tokens unless a stop string or one of `sampling.eos` ends it."""

    prompt: tuple[int, ...]
    new: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    session: str = ""
    model: str = TOY_MODEL

    def message(self) -> api_pb2.GenerateRequest:
        wanted = self.sampling
        return api_pb2.GenerateRequest(
            model=self.model,
            tokens=api_pb2.TokenIds(ids=self.prompt),
            max_tokens=self.new,
            sampling=api_pb2.Sampling(
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                top_k=wanted.top_k,
                min_p=wanted.min_p,
                repetition_penalty=wanted.repetition_penalty,
                seed=wanted.seed,
                typical_p=wanted.typical_p,
                presence_penalty=wanted.presence_penalty,
                frequency_penalty=wanted.frequency_penalty,
                no_repeat_ngram_size=wanted.no_repeat_ngram_size,
                min_tokens=wanted.min_tokens,
                logit_bias=dict(wanted.logit_bias),
                stop_token_ids=wanted.eos,
                allowed_token_ids=wanted.allowed_tokens,
            ),
            stop=self.stop,
            session_id=self.session,
            ignore_eos=not wanted.eos,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """Everything that one request received. Without `finish` it was cancelled, and the answer is incomplete."""

    request: Request
    tokens: tuple[int, ...]
    positions: tuple[int, ...]  # position of every token in the session's log
    text: str
    finish: str

    @property
    def log(self) -> list[int]:
        return [*self.request.prompt, *self.tokens]


class Stream:
    """A running request, read by its own thread."""

    def __init__(self, stub: api_pb2_grpc.InferenceStub, request: Request) -> None:
        self.request = request
        self._parts: list[api_pb2.GenerateResponse] = []
        self._count = 0
        self.times: list[float] = []  # by `perf_counter`, of every part with tokens
        self._error: grpc.RpcError | None = None
        self._done = False
        self._changed = threading.Condition()
        self._call = stub.GenerateStream(request.message(), timeout=ANSWER_SECONDS)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for part in self._call:
                with self._changed:
                    self._parts.append(part)
                    self._count += len(part.token_ids)
                    if part.token_ids:
                        self.times.append(time.perf_counter())
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """Return the number of received tokens."""
        return self._count

    @property
    def done(self) -> bool:
        with self._changed:
            return self._done

    def wait_tokens(self, count: int) -> None:
        """Wait for `count` tokens; the stream must not end before."""
        self._wait(count)
        assert self.count >= count, f"{self.count} tokens came: {self._error}"

    def read_and_cancel(self, count: int) -> Answer:
        """Return what was received up to `count` tokens, or the whole answer if it is shorter."""
        self._wait(count)
        self.cancel()
        received, error = self.received()
        if error is not None and error.code() is not grpc.StatusCode.CANCELLED:
            raise error
        assert received.finish or self.count >= count, f"only {self.count} tokens came"
        return received

    def _wait(self, count: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._count >= count, ANSWER_SECONDS)

    def cancel(self) -> None:
        """Cancel the call, and wait for its thread."""
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._thread.join()

    def answer(self) -> Answer:
        """Return the whole answer, or raise the grpc.RpcError that ended it."""
        received, error = self.received()
        if error is not None:
            raise error
        return received

    def received(self) -> tuple[Answer, grpc.RpcError | None]:
        """Return what was received until the stream ended, and the error that ended it, or None."""
        self._thread.join()
        parts = self._parts
        answer = Answer(
            request=self.request,
            tokens=tuple(token for part in parts for token in part.token_ids),
            positions=tuple(
                part.position + index for part in parts for index in range(len(part.token_ids))
            ),
            text="".join(part.text for part in parts),
            finish=parts[-1].finish_reason if parts else "",
        )
        return answer, self._error
