"""The contract between the server core and a model that computes blocks.

`core/step.py` plans a step as a tuple of tasks: batch items, and reads and writes of KV for transfers. The engine
thread calls `Model.step`, and the core takes the results. Two implementations: `transformer/span.py` and
`hash_model.py` (exact, no torch, for protocol tests).
A model keeps KV by page number only and knows no sessions: the core decides which session owns a page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from modelswarm.protocol.messages import (
    Adapter,
    FaultKind,
    Grammar,
    PromptLogprob,
    Sampling,
    TopLogprob,
)

NO_GRAMMARS = "this server has no tokenizer by which an answer could be constrained"
"""Error of a session with a grammar at a model without `grammars`."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that the core needs for its accounting."""

    first: int  # blocks [first, last) are held here
    last: int
    n_blocks: int  # of the whole model
    row_bytes: int  # one row at a block boundary
    page_size: int  # positions per page
    total_pages: int
    max_length: int  # most positions of one session (the model's context)
    vocab_size: int
    kv_bytes: int = 8  # keys and values of one position in one block; the hash model's by default
    block_bytes: int = 1 << 16  # weights that a step reads in one block
    windows: tuple[int | None, ...] = ()  # sliding window of each block here; (): none has any
    logit_bytes: int = 0  # a returned row of logits; 0: this model returns none
    hidden_bytes: int = 0  # a returned row of last hidden states; 0: this model returns none

    @property
    def is_head(self) -> bool:
        return self.first == 0

    @property
    def is_tail(self) -> bool:
        return self.last == self.n_blocks


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Request to the tail to sample log entry `position` after the last row of a batch item."""

    sampling: Sampling
    position: int
    log: Sequence[int]  # entries [0, position); borrowed until the step retires, never changed
    begin: int  # log length at the turn's begin: log[begin:] has been generated in this turn
    session: int = 0  # key of what the model keeps for the session: the hop's handle
    mask: bytes | None = (
        None  # tokens that the grammar allows, one bit each; set by the tail's model
    )
    max_forced: int = 0  # tokens that the grammar forces after the sampled one, to return with it


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Request to the tail for the log probabilities of `targets`: each follows one of the item's first rows."""

    targets: Sequence[int]  # at least one, at most the rows of the item
    top: int  # most probable tokens to report with each


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """Request to the tail for the logits and last hidden states of an item's rows from position `first` on."""

    first: int  # within the item
    logits: bool
    hidden_states: bool

    def row_bytes(self, shape: ModelShape) -> int:
        """Return the bytes of one row: its logits, then its hidden state."""
        return self.logits * shape.logit_bytes + self.hidden_states * shape.hidden_bytes


@dataclass(frozen=True, slots=True)
class BatchItem:
    """Contiguous positions [first, first + count) of one session in one step.

    KV of positions < first is in `pages` already; the step writes positions [first, first + count) there.
    Exactly one of `tokens` (only when blocks[0] == 0) and `rows` is set.
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
    score: ScoreRequest | None = None  # tail only
    returned: ReturnRequest | None = None  # tail only
    # Rows that stand in place of embeddings, by position (R14, opaque rows); the tokens there are 0.
    opaque: Mapping[int, bytes] = field(default_factory=dict)
    # Rows that are added to those of a position, one before each of `blocks`, by position (R14, opaque rows).
    prompts: Mapping[int, bytes] = field(default_factory=dict)
    # Head or tail of a session with a block range: rows enter and leave at any block, and no token.
    is_range_end: bool = False
    adapter: str = ""  # name of the adapter that the model adds to these rows; "": none


@dataclass(frozen=True, slots=True)
class KvRead:
    """Task: return the KV of positions [first, first + count) in these blocks.

    The result has count x blocks x kv_bytes bytes, all blocks of a position together. Another server of the same
    variant can `KvWrite` it.
    """

    pages: Sequence[int]  # as in BatchItem
    first: int
    count: int
    blocks: tuple[int, int]  # absolute; within the model's own span


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Task: write KV that another server read into these pages."""

    pages: Sequence[int]
    first: int
    count: int
    blocks: tuple[int, int]
    kv: bytes | memoryview


@dataclass(frozen=True, slots=True)
class KvCopy:
    """Task: copy the KV of positions [first, first + count) from `source` pages into `pages` (R15, forks)."""

    source: Sequence[int]  # as in BatchItem; of another session
    pages: Sequence[int]
    first: int
    count: int
    blocks: tuple[int, int]


Task: TypeAlias = BatchItem | KvRead | KvWrite | KvCopy
"""One part of a step. A read sees the writes of earlier steps; no task of its own step writes to the same pages."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    token: int
    logprob: float  # natural log, of the unmodified distribution
    top: tuple[TopLogprob, ...] = ()  # `Sampling.logprobs` most probable tokens of it, falling
    forced: tuple[int, ...] = ()  # tokens that must follow, at most `SampleRequest.max_forced`


@dataclass(frozen=True, slots=True)
class Result:
    """Result of one task: rows for [emit_from, end) or KV as bytes, a sampled token if requested, or an error.

    `rows` is a buffer of this task alone that does not change any more: it is sent and retained in the replay log.
    """

    rows: bytes | memoryview | None = None
    sampled: SampledToken | None = None
    scores: tuple[PromptLogprob, ...] = ()  # one for each target of a score request
    returned: bytes | memoryview = b""  # the rows of a return request
    error: str | None = None  # of this session only; a failure of the whole step is an exception
    fault: FaultKind = FaultKind.FAILED  # kind of the error


@dataclass(frozen=True, slots=True)
class Compute:
    """The hardware that computes the steps, for metrics and logs."""

    threads: int = 1  # of the CPU
    device: str = "cpu"
    dtype: str = ""  # "": no number format
    numerics: str = ""  # numerics class; "": unknown
    layout: str = ""  # of the weights; "": transformers' own modules have them
    attention: str = ""  # the attention backend; "": no attention
    decode_graphs: bool = False  # decode steps are captured in CUDA graphs
    layout_seconds: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Measured seconds of products with a part of the weights, by layout and rows."""

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


class OutOfDeviceMemory(Exception):
    """A step needed more memory than its device has; the step is lost, the model can go on."""


class GrammarCompiler(Protocol):
    """The grammars of a tail's model. `start` and `prepare` run in any thread but the engine's."""

    @property
    def version(self) -> str:
        """The library that masks tokens, and its version."""
        ...

    def start(self) -> str:
        """Do once what all grammars need; return why none can be used, empty if they can."""
        ...

    def prepare(self, grammar: Grammar) -> str | None:
        """Compile the grammar for the sessions that have it; return why it cannot be used."""
        ...


class Model(Protocol):
    @property
    def shape(self) -> ModelShape: ...

    @property
    def grammars(self) -> GrammarCompiler | None:
        """The compiler of grammars; None if no session can be constrained here."""
        ...

    @property
    def adapters(self) -> Collection[Adapter]:
        """The adapters that sessions may name."""
        ...

    @property
    def compute(self) -> Compute: ...

    def prepare_thread(self) -> None:
        """Set up the thread that runs the steps; called once, by that thread."""
        ...

    def step(self, batch: Sequence[Task]) -> list[Result]:
        """Run the tasks and return one Result for each, in order. Called from one thread at a time."""
        ...
