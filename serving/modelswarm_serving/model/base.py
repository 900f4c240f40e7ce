"""The contract between the server core and whatever computes blocks.

`core.server` plans a step as a tuple of tasks: Work, and reads and writes of KV for copies. `engine.py` calls
`Model.step` on its own thread, the core takes the results. Two implementations: `span.py` (a transformer span) and
`hash.py` (exact, no torch, for protocol tests).
A model keeps KV by page number only; which session owns a page is the core's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from modelswarm.protocol.messages import Sampling


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the core must know of a model to account for it."""

    first: int  # blocks [first, last) are held here
    last: int
    n_blocks: int  # of the whole model
    row_bytes: int  # one row at a block boundary
    page_size: int  # positions per page
    total_pages: int
    max_length: int  # most positions of one session (the model's context)
    vocab_size: int
    kv_bytes: int = 8  # keys and values of one position in one block; the hash model's by default

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.n_blocks


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Ask the tail to sample log entry `position` after the last row of a Work."""

    sampling: Sampling
    position: int
    log: Sequence[int]  # entries [0, position); borrowed until the step retires, never changed


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Contiguous positions [first, first + count) of one session in one step.

    KV of positions < first is already in `pages`; the step writes positions [first, first + count) there.
    Exactly one of `tokens` (when blocks[0] == 0) and `rows` is set.
    """

    pages: Sequence[
        int
    ]  # page of position p is pages[p // page_size]; borrowed until the step retires
    first: int
    count: int
    blocks: tuple[int, int]  # absolute; within the model's own span
    tokens: Sequence[int] | None
    rows: bytes | memoryview | None  # count x row_bytes
    emit_from: int  # output rows are wanted for positions [emit, first + count); none when emit == first + count
    sample: SampleRequest | None  # tail only


@dataclass(frozen=True, slots=True)
class KvRead:
    """Give the KV of positions [first, first + count) in these blocks: count x blocks x kv_bytes bytes, as the pages
    hold it, all blocks of a position together. Another server of the same kind can `KvWrite` it."""

    pages: Sequence[int]  # as in Work
    first: int
    count: int
    blocks: tuple[int, int]  # absolute; within the model's own span


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Put KV that another server read into these pages."""

    pages: Sequence[int]
    first: int
    count: int
    blocks: tuple[int, int]
    kv: bytes | memoryview


Task: TypeAlias = BatchItem | KvRead | KvWrite
"""What a step is made of. A read sees what earlier steps wrote; nothing in its own step writes there."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: float  # natural log, of the unmodified distribution


@dataclass(frozen=True, slots=True)
class Result:
    """What one task gave: rows for [emit, end) or KV as bytes, a pick if one was asked for, or why it failed.

    `rows` is a buffer of this task alone, that nobody changes any more: it is sent, and kept with the session.
    """

    rows: bytes | memoryview | None = None
    sampled: SampledToken | None = None
    error: str | None = None  # this session only; a fault of the whole step is an exception


class Model(Protocol):
    @property
    def shape(self) -> ModelShape: ...

    def step(self, batch: Sequence[Task]) -> list[Result]:
        """Run the tasks; one Result for each, in order. Called from one thread at a time."""
        ...
