"""A session over gRPC as a test drives it: one request, then its answers. Knows no processes."""

from __future__ import annotations

import queue
from types import TracebackType
from typing import Any, Self

import grpc
from support.processes.streams import ANSWER_SECONDS

from modelswarm.protocol.wire import api_pb2, api_pb2_grpc


class SessionCall:
    """One call of `Inference.Session`. Its end without `close` is that of a client that goes away."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._requests: queue.SimpleQueue[api_pb2.SessionRequest | None] = queue.SimpleQueue()
        stub: Any = api_pb2_grpc.InferenceStub(self._channel)
        self._answers = stub.Session(iter(self._requests.get, None), timeout=ANSWER_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        self._channel.close()

    def send(self, **request: Any) -> None:
        self._requests.put(api_pb2.SessionRequest(**request))

    def receive(self) -> api_pb2.SessionResponse:
        answer: api_pb2.SessionResponse = next(self._answers)
        return answer

    def ask(self, **request: Any) -> api_pb2.SessionResponse:
        """Send a request that has one answer, and return that."""
        self.send(**request)
        return self.receive()

    def open(self, model: str, **fields: Any) -> api_pb2.SessionState:
        state: api_pb2.SessionState = self.ask(open={"model": model, **fields}).state
        return state

    def step(self, **fields: Any) -> list[api_pb2.SessionResponse]:
        """Run a step, and return all its parts."""
        self.send(step=fields)
        parts = [self.receive()]
        while not parts[-1].part.finish_reason:
            parts.append(self.receive())
        return parts

    def tokens(self, **fields: Any) -> list[int]:
        """Run a step, and return its tokens."""
        return [token for answer in self.step(**fields) for token in answer.part.token_ids]

    def failure(self) -> Any:
        """Return the error with which the call ends."""
        try:
            for _ in self._answers:
                continue
        except grpc.RpcError as error:
            return error
        raise AssertionError("the call ended without an error")

    def end(self) -> None:
        """Send no more requests."""
        self._requests.put(None)

    def cancel(self) -> None:
        self._answers.cancel()
        self.end()  # the channel's thread waits for it
