"""Runs of a pipeline: many jobs, some at a time, whose answers are collected or streamed.

A run ends its other jobs at the first error, unless errors are to be responses. All runs in the pipeline's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing

from modelswarm.client.pipeline.engine import Job, PipelineEngine
from modelswarm.client.pipeline.errors import AnswerAbortedError
from modelswarm.client.pipeline.response import Response, failed
from modelswarm.errors import ModelSwarmError

QUEUED_PARTS = 256  # of a stream, that its reader has not taken; the answers wait for it


class Run:
    """The workers of a run. Each takes the next job when it has ended one."""

    def __init__(
        self,
        engine: PipelineEngine,
        jobs: Sequence[Job],
        work: Callable[[Job], Awaitable[None]],
        on_failed: Callable[[Response], Awaitable[None]] | None,
    ) -> None:
        """`on_failed` gets the response in place of a failed answer; None: the first error ends the run."""
        self._engine = engine
        self._jobs, self._work, self._on_failed = iter(jobs), work, on_failed
        self._count = min(engine.most, len(jobs))
        self._workers: list[asyncio.Task[None]] = []
        self.is_ended = False  # by `end`, before all jobs had ended
        self.ended_jobs = 0
        self.error: ModelSwarmError | None = None
        self.failed_index = -1  # of the prompt whose error ended the run

    async def execute(self) -> None:
        """Run the jobs until all have ended. Raise the first error, when the others have ended."""
        if self.is_ended:
            return
        self._workers = [asyncio.create_task(self._serve(self._jobs)) for _ in range(self._count)]
        with self._engine.hold(self.end):
            try:
                ends = await asyncio.gather(*self._workers, return_exceptions=True)
            except asyncio.CancelledError:
                self.end()
                await self.wait_ended()
                raise
        for end in ends:
            if isinstance(end, Exception):
                raise end
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """Cancel what runs; nothing more is begun."""
        self.is_ended = True
        for worker in self._workers:
            worker.cancel()

    async def wait_ended(self) -> None:
        """Return when nothing of the run is left."""
        await asyncio.gather(*self._workers, return_exceptions=True)

    async def _serve(self, jobs: Iterator[Job]) -> None:
        for job in jobs:
            try:
                await self._work(job)
            except ModelSwarmError as error:
                if self._on_failed is None:
                    if self.error is None:
                        self.error, self.failed_index = error, job.index
                    self.end()
                    return
                await self._on_failed(failed(job.index, error))
            except Exception:
                self.end()
                raise
            self.ended_jobs += 1


class BatchRun:
    """A run whose whole answers are collected: `responses` has those that are there, by index."""

    def __init__(
        self,
        engine: PipelineEngine,
        jobs: Sequence[Job],
        *,
        raises: bool,
        on_done: Callable[[], object] = lambda: None,
    ) -> None:
        self.responses: dict[int, Response] = {}
        self._engine, self._on_done = engine, on_done
        self.run = Run(engine, jobs, self._answer, None if raises else self._keep)

    async def _answer(self, job: Job) -> None:
        await self._keep(await self._engine.answer(job))

    async def _keep(self, response: Response) -> None:
        self.responses[response.index] = response
        self._on_done()


class ScoreRun:
    """A run that scores prompts: `scores` has those that are there, by index. The first error ends it."""

    def __init__(self, engine: PipelineEngine, jobs: Sequence[Job]) -> None:
        self.scores: dict[int, float] = {}
        self._engine = engine
        self.run = Run(engine, jobs, self._score, None)

    async def _score(self, job: Job) -> None:
        self.scores[job.index] = await self._engine.score(job)


class StreamRun:
    """A run whose parts are read while it goes on, those of all prompts mixed."""

    def __init__(
        self, engine: PipelineEngine, jobs: Sequence[Job], *, raises: bool, whole: bool = False
    ) -> None:
        """`whole`: each answer is one part."""
        self._engine, self._whole = engine, whole
        self._parts: asyncio.Queue[Response] = asyncio.Queue(QUEUED_PARTS)
        self.run = Run(engine, jobs, self._stream_parts, None if raises else self._parts.put)
        self._task: asyncio.Task[None] | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether parts have been asked for."""
        return self._task is not None

    async def next_parts(self) -> list[Response]:
        """Return all parts that are there, at least one; none at the end.

        Raise the run's error, or AnswerAbortedError if the run was ended.
        """
        if self._task is None:
            self._task = asyncio.create_task(self.run.execute())
        if self._parts.empty() and not self._task.done():
            getting = asyncio.create_task(self._parts.get())
            try:
                await asyncio.wait({getting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not getting.done():
                    getting.cancel()
            if not getting.cancelled() and getting.done():
                return [getting.result(), *self._take()]
        parts = self._take()
        if not parts:
            await self._task
            if self.run.is_ended:
                raise AnswerAbortedError("the answers were ended before they were complete")
        return parts

    def _take(self) -> list[Response]:
        return [self._parts.get_nowait() for _ in range(self._parts.qsize())]

    async def _stream_parts(self, job: Job) -> None:
        if self._whole:
            await self._parts.put(await self._engine.answer(job))
            return
        async with aclosing(self._engine.stream(job)) as parts:
            async for part in parts:
                await self._parts.put(part)
