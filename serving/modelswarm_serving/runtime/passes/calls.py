"""Answers calls for passes through blocks: checks, memory, input, turns at the engine, result.

A call is refused before its input comes. It waits for memory, then sends its input, and gets the result. All that it
takes is free when it ends. Used by the node. Knows no sessions and no links.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from google.protobuf.message import DecodeError
from typing_extensions import Buffer

from modelswarm.placement.quantity import human_bytes
from modelswarm.protocol.block_passes import MAX_SEQUENCES, MESSAGE_BYTES
from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.link.stream import CallRefused, CallStatus, Stream
from modelswarm.protocol.wire import api_pb2
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.passes.contract import PassRunner, PassTask
from modelswarm_serving.runtime.passes.memory import PassMemory, Reservation
from modelswarm_serving.runtime.passes.schedule import PassSchedule, ScheduledPass

# Calls that may wait for memory.
MAX_WAITING = 64
# Seconds for the next message of a caller, and for one that the caller takes.
IDLE_TIMEOUT_SECONDS = 60.0
# Seconds that a call waits for memory.
WAIT_SECONDS = 60.0

# Field of a document and flag of a server that set the memory for passes.
_FIELDS = "spec.training.memory, --training-memory"


@dataclass(frozen=True, slots=True)
class PassServer:
    """The facts of this server that a call must name."""

    peer: PeerId
    dtype: str
    shape: ModelShape


class PassCalls:
    def __init__(
        self,
        server: PassServer,
        runner: PassRunner | None,
        memory: int,
        part_rows: int,
        schedule: PassSchedule,
        wake: Callable[[], None],
    ) -> None:
        """`memory`: bytes for all passes; 0: none are run. `part_rows`: most rows of a part of one.

        `wake` is called when a pass waits for the engine.
        """
        self._part_rows = part_rows
        self._server, self._runner, self._schedule, self._wake = server, runner, schedule, wake
        self._memory = PassMemory(memory, MAX_WAITING)
        self._running = 0
        self.is_draining = False

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    async def serve(self, stream: Stream) -> None:
        """Answer one call. Raise CallRefused, or StreamBroken if the caller is gone."""
        self._running += 1
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
                request = _parse(await stream.read())
            task = self._check(request.head)
            reserved = await self._reserve(task)
            await self._run(stream, task, reserved)
        except TimeoutError as error:
            detail = f"the caller sent or took nothing for {IDLE_TIMEOUT_SECONDS:.0f} s"
            raise CallRefused(CallStatus.DEADLINE_EXCEEDED, detail) from error
        finally:
            self._running -= 1

    async def _reserve(self, task: PassTask) -> Reservation:
        if self._memory.is_crowded:
            detail = f"{MAX_WAITING} passes wait for memory already"
            raise CallRefused(CallStatus.RESOURCE_EXHAUSTED, detail)
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await self._memory.reserve(task.memory(self._server.shape))
        except TimeoutError as error:
            detail = f"other passes took the memory for {WAIT_SECONDS:.0f} s"
            raise CallRefused(CallStatus.RESOURCE_EXHAUSTED, detail) from error

    async def _run(self, stream: Stream, task: PassTask, reserved: Reservation) -> None:
        scheduled: ScheduledPass | None = None
        try:
            accepted = api_pb2.PassAccepted(last=task.blocks[1])
            await _write(stream, api_pb2.BlockPassResponse(accepted=accepted))
            data = await self._read_input(stream, task)
            ended: asyncio.Future[bytes | str | None] = asyncio.get_running_loop().create_future()
            scheduled = self._scheduled_pass(task, data, ended, reserved)
            del data
            self._schedule.enqueue_pass(scheduled)
            self._wake()
            result = await ended
            if not isinstance(result, bytes):
                raise CallRefused(CallStatus.INTERNAL, f"the pass failed: {result}")
            reserved.shrink(len(result))
            for at in range(0, len(result), MESSAGE_BYTES):
                part = result[at : at + MESSAGE_BYTES]
                await _write(stream, api_pb2.BlockPassResponse(data=part))
        finally:
            if scheduled is None or scheduled.has_ended:
                reserved.shrink(0)
            else:
                self._schedule.abandon(scheduled)

    def _scheduled_pass(
        self,
        task: PassTask,
        data: bytearray,
        ended: asyncio.Future[bytes | str | None],
        reserved: Reservation,
    ) -> ScheduledPass:
        def on_end(result: bytes | str | None) -> None:
            if ended.done():  # the caller is gone
                reserved.shrink(0)
            else:
                ended.set_result(result)

        assert self._runner is not None
        return ScheduledPass(self._runner.start_pass(task, data, self._part_rows), on_end)

    async def _read_input(self, stream: Stream, task: PassTask) -> bytearray:
        wanted = task.input_bytes(self._server.shape)
        data = bytearray()
        while len(data) < wanted:
            async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
                part = _parse(await stream.read()).data
            if not part or len(data) + len(part) > wanted:
                detail = f"{wanted} bytes of input are needed, and the next part has {len(part)}"
                raise CallRefused(CallStatus.INVALID_ARGUMENT, detail)
            data += part
        return data

    def _check(self, head: api_pb2.PassHead) -> PassTask:
        """Return the pass that is run here: of a forward pass as many blocks as fit. Raise CallRefused."""
        server, shape = self._server, self._server.shape
        if head.server != server.peer:
            raise CallRefused(CallStatus.UNAVAILABLE, f"this is {server.peer}, not {head.server}")
        if self._runner is None:
            raise CallRefused(CallStatus.UNIMPLEMENTED, "the model of this server has no gradients")
        if not self._memory.limit:
            detail = f"this server has no memory for passes; give it some ({_FIELDS})"
            raise CallRefused(CallStatus.UNIMPLEMENTED, detail)
        if self.is_draining:
            raise CallRefused(CallStatus.UNAVAILABLE, "this server is stopping")
        first, last = head.blocks.first, head.blocks.last
        if not shape.first <= first < min(last, shape.last) or (
            head.backward and last > shape.last
        ):
            detail = f"this server has blocks {shape.first}:{shape.last}, not {first}:{last}"
            raise CallRefused(CallStatus.UNAVAILABLE, detail)
        task = PassTask(
            (first, min(last, shape.last)),
            tuple(head.lengths),
            head.prompt_rows,
            head.backward,
        )
        _check_rows(head, task, server)
        return self._fit(task)

    def _fit(self, task: PassTask) -> PassTask:
        shape, (first, last) = self._server.shape, task.blocks
        fitting = [
            replace(task, blocks=(first, end))
            for end in ((last,) if task.is_backward else range(last, first, -1))
        ]
        for smaller in fitting:
            if smaller.memory(shape) <= self._memory.limit:
                return smaller
        needed, limit = human_bytes(fitting[-1].memory(shape)), human_bytes(self._memory.limit)
        blocks = fitting[-1].blocks[1] - first
        detail = (
            f"{task.rows} rows of {blocks} block{'s' * (blocks > 1)} need {needed} for a pass, and the server has "
            f"{limit} ({_FIELDS}); send fewer rows at a time"
        )
        code = CallStatus.FAILED_PRECONDITION if blocks > 1 else CallStatus.INVALID_ARGUMENT
        raise CallRefused(code, detail)


def _check_rows(head: api_pb2.PassHead, task: PassTask, server: PassServer) -> None:
    """Refuse rows that the gateway would have refused."""
    lengths, shape = task.lengths, server.shape
    fault = ""
    if not 0 < len(lengths) <= MAX_SEQUENCES:
        fault = f"{len(lengths)} sequences; allowed: 1 to {MAX_SEQUENCES}"
    elif min(lengths) < 1 or max(lengths) > shape.max_length:
        fault = f"a sequence has no row, or more than {shape.max_length}"
    elif task.prompt_rows > min(lengths):
        fault = f"{task.prompt_rows} prompt rows for a sequence of {min(lengths)} rows"
    elif head.dtype != server.dtype:
        fault = f"the dtype is {head.dtype}, not {server.dtype}"
    elif not head.hidden_size or shape.row_bytes % head.hidden_size:
        fault = f"rows of {head.hidden_size} numbers do not have {shape.row_bytes} bytes"
    if fault:
        raise CallRefused(CallStatus.INVALID_ARGUMENT, fault)


def _parse(raw: Buffer) -> api_pb2.BlockPassRequest:
    try:
        return api_pb2.BlockPassRequest.FromString(bytes(raw))
    except DecodeError as error:
        raise CallRefused(CallStatus.INVALID_ARGUMENT, "no BlockPassRequest") from error


async def _write(stream: Stream, response: api_pb2.BlockPassResponse) -> None:
    async with asyncio.timeout(IDLE_TIMEOUT_SECONDS):
        await stream.write(response.SerializeToString())
