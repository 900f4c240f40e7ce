"""A route without a network: spans of one model in this process, driven step by step.

Shows that spans compute what the whole model computes. Sessions hold pages on every span, and share each step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import BatchItem, Model, Result, SampledToken, SampleRequest
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

OPTIONS = SpanOptions(threads=1, pages=256, page_size=4)


@dataclass
class Stream:
    """One session: its log, and the pages of its KV."""

    log: list[int]
    sampling: Sampling = field(default_factory=Sampling)
    picked: list[SampledToken] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    done: int = 0  # positions with KV
    sent: dict[int, bytearray] = field(default_factory=dict)
    """Number of a span -> the rows that it sent, as its replay log retains them."""
    adapter: str = ""
    begin: int = field(init=False)
    """Length of the log before the first generated token."""

    def __post_init__(self) -> None:
        self.begin = len(self.log)


class Chain:
    def __init__(self, spans: Sequence[Model], *, seed: int | None = None) -> None:
        self.spans = spans
        self._free = list(range(min(span.shape.total_pages for span in spans)))
        if seed is not None:
            random.Random(seed).shuffle(self._free)  # pages of a session are not adjacent

    def generate(
        self, streams: Sequence[Stream], count: int, *, chunk: int = 512, eos: int | None = None
    ) -> None:
        """Run until every stream has `count` more tokens or `eos`; prompts enter in chunks."""
        ends = [len(stream.log) + count for stream in streams]
        while True:
            ready = [
                stream
                for stream, end in zip(streams, ends, strict=True)
                if len(stream.log) < end
                and (eos is None or not stream.picked or stream.log[-1] != eos)
            ]
            if not ready:
                return
            self.step(ready, chunk)

    def step(self, streams: Sequence[Stream], chunk: int) -> None:
        rows: list[bytes | memoryview | None] = [None] * len(streams)
        counts = [min(chunk, len(stream.log) - stream.done) for stream in streams]
        results: list[Result] = []
        for number, span in enumerate(self.spans):
            works = [
                self._work(span, stream, n, row)
                for stream, n, row in zip(streams, counts, rows, strict=True)
            ]
            results = span.step(works)
            errors = [result.error for result in results if result.error]
            assert not errors, errors
            rows = [result.rows for result in results]
            for stream, row in zip(streams, rows, strict=True):
                stream.sent.setdefault(number, bytearray()).extend(row or b"")
        for stream, n, result in zip(streams, counts, results, strict=True):
            stream.done += n
            if result.sampled is not None:
                stream.picked.append(result.sampled)
                stream.log.append(result.sampled.token)

    def replay(self, number: int, span: Model, streams: Sequence[Stream]) -> None:
        """Put another span in the place of one that is lost, and rebuild its KV from tokens or rows."""
        self.spans = [*self.spans[:number], span, *self.spans[number + 1 :]]
        works = [
            BatchItem(
                pages=stream.pages,
                first=0,
                count=stream.done,
                blocks=(span.shape.first, span.shape.last),
                tokens=None if number else stream.log[: stream.done],
                rows=bytes(stream.sent[number - 1]) if number else None,
                emit_from=stream.done,
                sample=None,
                adapter=stream.adapter,
            )
            for stream in streams
        ]
        errors = [result.error for result in span.step(works) if result.error]
        assert not errors, errors

    def _work(
        self, span: Model, stream: Stream, count: int, rows: bytes | memoryview | None
    ) -> BatchItem:
        shape = span.shape
        end = stream.done + count
        while len(stream.pages) * shape.page_size < end:
            stream.pages.append(self._free.pop(0))
        last = end == len(stream.log)
        return BatchItem(
            pages=stream.pages,
            first=stream.done,
            count=count,
            blocks=(shape.first, shape.last),
            tokens=stream.log[stream.done : end] if shape.is_head else None,
            rows=None if shape.is_head else rows,
            emit_from=end if shape.is_tail else stream.done,
            sample=SampleRequest(stream.sampling, end, stream.log, stream.begin)
            if shape.is_tail and last
            else None,
            adapter=stream.adapter,
        )


def load_chain(
    folder: Path, cuts: Sequence[int], *, options: SpanOptions = OPTIONS, seed: int | None = None
) -> Chain:
    """Return spans between adjacent cuts, e.g. (0, 2, 4)."""
    spans = [load_span(folder, first, last, options) for first, last in itertools.pairwise(cuts)]
    return Chain(spans, seed=seed)
