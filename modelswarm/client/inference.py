"""Client of the gateway's gRPC Inference service: one streamed chat, with token ids and arrival times.

Used by `demo`, which compares runs token for token. Does not know servers or routes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import grpc

from modelswarm.client.swarm import error_details
from modelswarm.errors import ModelSwarmError
from modelswarm.process.socket_options import WITHOUT_PROXY
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc

ANSWER_TIMEOUT_SECONDS = 120.0  # for a whole answer, pauses included


class InferenceClientError(ModelSwarmError):
    """The stream could not be started, or broke off before its end."""


@dataclass(frozen=True, slots=True)
class ReceivedChunk:
    """One message of the stream, with its arrival time."""

    at: float  # time.monotonic, seconds
    text: str
    tokens: tuple[int, ...]
    position: int  # of the first token in the session's input log


class InferenceClient:
    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target, options=(WITHOUT_PROXY,))
        self._inference = api_pb2_grpc.InferenceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._channel.close()

    def stream_chat(self, model: str, question: str, max_tokens: int) -> Iterator[ReceivedChunk]:
        """Stream the greedy answer to `question` until it is finished."""
        request = api_pb2.GenerateRequest(
            model=model,
            chat=api_pb2.Messages(messages=[api_pb2.Message(role="user", content=question)]),
            max_tokens=max_tokens,
            sampling=api_pb2.Sampling(temperature=0.0),
        )
        try:
            for part in self._inference.GenerateStream(request, timeout=ANSWER_TIMEOUT_SECONDS):
                yield ReceivedChunk(
                    time.monotonic(), part.text, tuple(part.token_ids), part.position
                )
        except grpc.RpcError as error:
            raise InferenceClientError(f"the stream ended early: {error_details(error)}") from error
