"""Forward and backward passes through blocks on servers, as calls that are repeated when a server is lost.

A range of blocks is run piece by piece, each on one server, as the gateway finds them. The input of each piece stays
here. So a lost server costs its own piece again, forward or backward, and nothing else. Rows are bytes in the servers'
dtype. Knows no tensors.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import grpc

from modelswarm.client.sessions.base import RECONNECT_SECONDS, RETRY_SECONDS
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import ConnectionLostError, RefusedError, translate
from modelswarm.errors import ModelSwarmError, UnavailableError
from modelswarm.protocol.block_passes import MESSAGE_BYTES
from modelswarm.protocol.wire import api_pb2

Result = TypeVar("Result")


class _NotOnOneServer(ModelSwarmError):
    """No server has all blocks of a backward pass, or the memory for them."""


class BatchTooLargeError(RefusedError):
    """A pass needs more memory than a server has; fewer sequences, or shorter ones, need less."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences that run together, with the prompts of each block of the range; prompts are empty if there are none."""

    lengths: tuple[int, ...]
    prompt_rows: int
    prompts: tuple[bytes, ...]  # one per block of the range
    first: int  # block of the first prompt

    def prompts_of(self, first: int, last: int) -> bytes:
        return b"".join(self.prompts[first - self.first : last - self.first])


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks [first, last) that one server has run, and the rows that entered."""

    first: int
    last: int
    rows: bytes


@dataclass(frozen=True, slots=True)
class Gradients:
    rows: bytes
    prompts: bytes  # of the blocks in their order


class BlockPasses:
    """Passes of one model. Threads may share it."""

    def __init__(
        self,
        connection: Connection,
        served: ServedModel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connection, self._served, self._clock = connection, served, clock

    def run_forward(
        self, first: int, last: int, batch: Batch, rows: bytes
    ) -> tuple[bytes, list[Piece]]:
        """Return the rows behind the blocks, and the pieces in which they were run.

        Raise RefusedError for what no server runs, UnavailableError or ConnectionLostError if none answers in time.
        """
        pieces: list[Piece] = []
        while first < last:
            end, found = self._repeat(partial(self._forward, first, last, batch, rows))
            pieces.append(Piece(first, end, rows))
            first, rows = end, found
        return rows, pieces

    def run_backward(self, pieces: Sequence[Piece], batch: Batch, gradients: bytes) -> Gradients:
        """Return the gradients of the first piece's rows and of the prompts. Raise as `run_forward` does."""
        prompts: list[bytes] = []
        for piece in reversed(pieces):
            found = self._repeat(partial(self._backward, piece, batch, gradients))
            gradients = found.rows
            prompts.insert(0, found.prompts)
        return Gradients(gradients, b"".join(prompts))

    def _forward(self, first: int, last: int, batch: Batch, rows: bytes) -> tuple[int, bytes]:
        head = self._head(first, last, batch)
        return self._call(head, lambda end: (rows, batch.prompts_of(first, end)))

    def _backward(self, piece: Piece, batch: Batch, gradients: bytes) -> Gradients:
        """Run one piece back. Where no server has all its blocks any more, it is run again in smaller pieces."""
        head = self._head(piece.first, piece.last, batch)
        head.backward = True
        prompts = batch.prompts_of(piece.first, piece.last)
        try:
            _, found = self._call(head, lambda _: (piece.rows, prompts, gradients))
        except _NotOnOneServer:
            _, pieces = self.run_forward(piece.first, piece.last, batch, piece.rows)
            if len(pieces) == 1:
                raise UnavailableError(
                    f"no server runs blocks {piece.first}:{piece.last} backward now", RETRY_SECONDS
                ) from None
            return self.run_backward(pieces, batch, gradients)
        size = len(piece.rows)
        return Gradients(found[:size], found[size:])

    def _repeat(self, run: Callable[[], Result]) -> Result:
        """Run a pass until it succeeds. Raise the last failure at the deadline."""
        deadline = self._clock() + RECONNECT_SECONDS
        while True:
            try:
                return run()
            except (UnavailableError, ConnectionLostError) as error:
                pause = max(RETRY_SECONDS, getattr(error, "retry_after", 0.0))
                if self._clock() + pause > deadline:
                    raise
            time.sleep(pause)

    def _head(self, first: int, last: int, batch: Batch) -> api_pb2.PassHead:
        return api_pb2.PassHead(
            model=self._served.name,
            blocks=api_pb2.BlockRange(first=first, last=last),
            lengths=batch.lengths,
            prompt_rows=batch.prompt_rows,
            dtype=self._served.dtype,
            hidden_size=self._served.hidden_size,
        )

    def _call(
        self, head: api_pb2.PassHead, parts: Callable[[int], Sequence[bytes]]
    ) -> tuple[int, bytes]:
        """Make one call, whose input is `parts(end of its blocks)`. Return that end and the result."""
        requests: queue.SimpleQueue[api_pb2.BlockPassRequest | None] = queue.SimpleQueue()
        requests.put(api_pb2.BlockPassRequest(head=head))
        call: Any = self._connection.stream_pass(iter(requests.get, None))
        try:
            last = next(call).accepted.last
            for part in parts(last):
                for at in range(0, len(part), MESSAGE_BYTES):
                    requests.put(api_pb2.BlockPassRequest(data=part[at : at + MESSAGE_BYTES]))
            return last, b"".join(answer.data for answer in call)
        except grpc.RpcError as error:
            raise _translated(error, self._connection.target) from error
        finally:
            requests.put(None)
            call.cancel()


def _translated(error: grpc.RpcError, target: str) -> ModelSwarmError:
    failed: Any = error
    codes = dict(failed.trailing_metadata() or ())
    if codes.get("error-code") == "blocks_uncovered":
        return _NotOnOneServer(failed.details())
    if codes.get("error-code") == "request_too_large":
        field = codes.get("error-param", "request")
        return BatchTooLargeError(field, failed.details().removeprefix(f"{field}: "))
    if failed.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ModelSwarmError(
            f"the gateway at {target} is older, and runs no forward and backward passes"
        )
    return translate(error, target)
