"""Memory of one server process, part by part: the only place that computes it.

The plan, the command line, the operator and servers use the same sums, so a planned server fits where it starts. Knows
facts of models; knows no documents, no torch and no control groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelswarm.checkpoint.facts import DTYPES, ModelFacts
from modelswarm.checkpoint.families.family import BlockPath
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.placement.quantity import human_bytes
from modelswarm.placement.replay_memory import replay_bytes
from modelswarm.placement.spans import Span

PROCESS_BYTES = 768 << 20
"""Resident memory of a server before it loads a model: interpreter, torch, transformers. Measured with torch 2.15 and
its CUDA libraries on a CPU, without Triton's compiler: 694 MiB, 414 of them private. Loading and
steps touch further pages of the libraries (24 MiB, measured), and oneDNN keeps code of its products (30 MiB). The build
of the server image measures it again, and refuses an image that takes more. A server takes its own number at its start
if that is larger."""
DEVICE_PROCESS_BYTES = 3 << 30
"""The same of a server on an accelerator, once it serves. It also has the device's context, its libraries, Triton's
compiler and the programs that it starts, and pinned buffers. Not measured yet: `python -m bench.gpu` reports the memory
of a server's process."""
CONTEXT_BYTES = 512 << 20
"""Memory of an accelerator that neither weights nor KV have: the context of a process, workspaces of libraries,
captured decode steps. Not measured yet. A server measures its own: were it larger, a server could refuse what was
planned."""
GRAMMAR_BYTES = 8 << 20
"""Memory of compiled grammars and of the sessions that follow them, only at a tail. Measured with 64 grammars of 20
properties and 64 answers: 7 MiB. The margin is for larger ones."""
GRAMMAR_BYTES_PER_TOKEN = 1 << 10
"""Tables of the tokenizer for grammars, per token of the vocabulary, while they are built. Measured with llguidance
1.9: 37 MiB for 32,000 tokens, 156 MiB for 150,000."""
MARGIN_BYTES = 64 << 20
"""Margin for buffers of links, for files in the page cache and for the kernel's tables ..."""
MARGIN_PARTS = 32
"""... and beside it one of so many parts of everything that a model takes, for the gaps of the allocator."""
MEMORY_FRACTION = 0.9
"""Share of an accelerator's memory that a server takes, if it is not told otherwise."""
TOKEN_BUDGET = 512
"""Rows of the largest step, if a server is not told otherwise."""
PREFILL_ROWS = 32
"""Rows of prefill that a step runs beside a full budget of decode rows."""
SCORE_BYTES = 64 << 20
"""Most bytes of attention scores that exist at once; only families that change them, as Gemma 2, have any in memory."""
LOGIT_ROWS = 64
"""Most rows whose logits exist at once."""
TRAINING_BYTES = 256 << 20
"""Most bytes of forward and backward passes on a CPU, if a server is not told otherwise. Then they are not part of the
plan: a server takes what the limit of its container leaves beside it."""
SAMPLE_BYTES = 64 << 20
"""Bytes of the sampler's tables on a CPU beside the logits, of as many rows as fit and of one at least."""
SAMPLE_BYTES_PER_LOGIT = 80
"""Bytes of the sampler's tables per logit: scores in float64, noise in words of 64 bits, and their copies."""

_SCORED = frozenset(each.name for each in FAMILIES.values() if each.has_score_tables)
"""Families whose attention scores are changed, as by a cap, which needs them in memory."""
_WINDOWED = frozenset(each.name for each in FAMILIES.values() if each.is_windowed)
"""Families with two kinds of attention in one model: each has its own masks."""
_JOINED = frozenset(
    each.name for each in FAMILIES.values() if any("*" in name for name in each.experts)
)
"""Families whose experts are single tensors in the files."""
_MAX_HEAD_DIM = 256
"""Largest head of the supported families."""
_HIDDEN_ROWS = 8
"""Rows of the model's width that one row needs at once: input, residual, norms in float32."""
_FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True)
class ServerMemory:
    """Bytes of one server, by part; `total` is what its container needs."""

    process: int  # interpreter and libraries; on an accelerator the context
    weights: int
    activations: int  # of the largest step, or of loading if that takes more
    grammars: int  # tables of the tokenizer and compiled grammars, at a tail
    retained: int  # rows of the replay log
    margin: int
    kv: int
    training: int = 0  # of forward and backward passes
    adapters: int = 0  # weights of LoRA adapters

    @property
    def total(self) -> int:
        return sum(size for _, size in self.parts)

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """Name and bytes of every part, in the order in which they are shown."""
        return (
            ("process", self.process),
            ("weights", self.weights),
            ("activations", self.activations),
            ("grammars", self.grammars),
            ("retained rows", self.retained),
            ("margin", self.margin),
            ("KV", self.kv),
            *((("training", self.training),) if self.training else ()),
            *((("adapters", self.adapters),) if self.adapters else ()),
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {human_bytes(size)}" for name, size in self.parts)


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Memory of a server of one span as a function of its pages; plan and server use the same."""

    process: int
    weights: int
    activations: int
    kv_per_page: int
    retained_per_page: int  # 0 with a replay log of a given size
    retained: int = 0  # size of such a log
    grammars: int = 0  # 0 but at a tail
    training: int = 0
    adapters: int = 0

    def with_pages(self, pages: int) -> ServerMemory:
        retained = self.retained + pages * self.retained_per_page
        kv = pages * self.kv_per_page
        weights = self.weights + self.adapters
        variable = weights + self.activations + self.grammars + retained + kv + self.training
        return ServerMemory(
            process=self.process,
            weights=self.weights,
            activations=self.activations,
            grammars=self.grammars,
            retained=retained,
            margin=MARGIN_BYTES + -(-variable // MARGIN_PARTS),
            kv=kv,
            training=self.training,
            adapters=self.adapters,
        )

    def needed(self, pages: int) -> int:
        """Return the smallest limit under which a server with these pages starts."""
        return self.with_pages(pages).total

    def most_pages(self, limit: int) -> int:
        """Return the most pages whose server needs no more than `limit` bytes; 0 if not even one fits."""
        low, high = 0, max(0, limit) // max(1, self.kv_per_page + self.retained_per_page)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.needed(middle) <= limit else (low, middle - 1)
        return low


def server_memory(
    facts: ModelFacts,
    span: Span,
    dtype: str,
    page_size: int,
    max_length: int,
    token_budget: int = TOKEN_BUDGET,
    process: int = PROCESS_BYTES,
    replay_memory: int | None = None,
) -> MemoryModel:
    """Return the memory of a server that computes on the CPU, where everything is in the memory of its container.

    `process`: measured size, if it is larger than the constant. `replay_memory`: size of the replay log; None: a row
    for every position of the pages.
    """
    rows = replay_bytes(facts.row_bytes(dtype), page_size) if replay_memory is None else 0
    return MemoryModel(
        process=max(process, PROCESS_BYTES),
        weights=facts.weight_bytes(span.first, span.last, dtype),
        activations=max(
            _step_bytes(
                facts, span, dtype, max_length, token_budget, sample_rows(facts.config.vocab)
            ),
            _loading_bytes(facts, span, dtype, generic_copies=1),
        ),
        kv_per_page=span.blocks * facts.kv_bytes(dtype) * page_size,
        retained_per_page=rows,
        retained=replay_memory or 0,
        grammars=grammar_bytes(facts, span),
    )


def device_memory(
    facts: ModelFacts,
    span: Span,
    dtype: str,
    page_size: int,
    max_length: int,
    token_budget: int = TOKEN_BUDGET,
) -> MemoryModel:
    """Return the memory of a server on its accelerator: of the process only the context, no grammars, no replay log.

    Its sampler takes LOGIT_ROWS at once. Weights of the generic path stay on the device as they come.
    """
    memory = server_memory(facts, span, dtype, page_size, max_length, token_budget, replay_memory=0)
    activations = max(
        _step_bytes(facts, span, dtype, max_length, token_budget, LOGIT_ROWS),
        _loading_bytes(facts, span, dtype, generic_copies=0),
    )
    return replace(memory, process=CONTEXT_BYTES, grammars=0, activations=activations)


def host_memory(
    facts: ModelFacts,
    span: Span,
    dtype: str,
    page_size: int,
    process: int = DEVICE_PROCESS_BYTES,
    replay_memory: int | None = None,
) -> MemoryModel:
    """Return the memory of the container of a server that computes on an accelerator.

    All weights of the span are there while they are loaded, before they move to the device. `process`: measured size; a
    server must not refuse its container for a constant that was never measured.
    """
    memory = server_memory(
        facts, span, dtype, page_size, 1, 1, process=process, replay_memory=replay_memory
    )
    return replace(memory, activations=_joined_bytes(facts, span, dtype), kv_per_page=0)


def adapter_bytes(facts: ModelFacts, span: Span, dtype: str, count: int, rank: int) -> int:
    """Return the weights of `count` adapters of this rank, each in all projections of the blocks."""
    # A projection joins the model's width and another one, and has the product of both in weights.
    hidden = facts.config.hidden
    elements = facts.span_elements(*span) // hidden + span.blocks * _HIDDEN_ROWS * hidden
    return count * rank * elements * DTYPES[dtype]


def grammar_bytes(facts: ModelFacts, span: Span) -> int:
    """Return what grammars take at the server that samples; 0 elsewhere."""
    if span.last != facts.config.n_blocks:
        return 0
    return GRAMMAR_BYTES + facts.config.vocab * GRAMMAR_BYTES_PER_TOKEN


def sample_rows(vocab: int) -> int:
    """Return the rows that are sampled at once on a CPU."""
    return max(1, SAMPLE_BYTES // (vocab * SAMPLE_BYTES_PER_LOGIT))


def score_rows(heads: int, keys: int) -> int:
    """Return the rows whose attention scores are in memory at once: four tables of float32 each."""
    return max(1, SCORE_BYTES // (heads * keys * 4 * _FLOAT))


def _step_bytes(
    facts: ModelFacts, span: Span, dtype: str, max_length: int, token_budget: int, most: int
) -> int:
    config, size = facts.config, DTYPES[dtype]
    rows, kinds = token_budget + PREFILL_ROWS, 1 + (config.family in _WINDOWED)
    # Each weight of a block is the product of one input and one output: its outputs are at most this many.
    outputs = facts.largest_block(*span) // config.hidden
    width = (outputs + _HIDDEN_ROWS * config.hidden) * _FLOAT
    # Scores are added to a mask, which is made from two tables of truth values.
    masks = kinds * max_length * (size + 2)
    # Tables of angles double as positions grow; while the next ones are made, the last ones exist too.
    positions = 1 << (max_length - 1).bit_length()
    tables = 3 * kinds * positions * min(_MAX_HEAD_DIM, facts.kv_elements // 2) * size
    gathered = max_length * facts.kv_bytes(dtype)  # where the pages of a session are no neighbours
    total = rows * (width + masks) + tables + gathered
    if config.family in _SCORED:
        total += 3 * gathered + SCORE_BYTES  # keys and values are repeated for their queries
    if span.last == config.n_blocks:
        sampled = min(rows, LOGIT_ROWS)
        logits = config.vocab * (size + _FLOAT)
        sampler = min(sampled, most) * config.vocab * SAMPLE_BYTES_PER_LOGIT
        total += sampled * logits + sampler
    return total


def _joined_bytes(facts: ModelFacts, span: Span, dtype: str) -> int:
    """Return the experts that transformers holds twice while it joins those of a block: two of three matrices each.

    Loading eight blocks of Qwen3-MoE, 195 MiB each in float32, took 124 MiB more at its peak than at its end.
    """
    if facts.config.family not in _JOINED:
        return 0
    return 2 * facts.largest_block(*span) // 3 * DTYPES[dtype]


def _loading_bytes(facts: ModelFacts, span: Span, dtype: str, *, generic_copies: int) -> int:
    """Return what loading copies: the projections of a fused block are joined and turned, the head is turned.

    The generic path copies one projection at a time on a CPU, and none on a device.
    """
    is_generic = FAMILIES[facts.config.family].path is BlockPath.GENERIC
    block = (generic_copies if is_generic else 2) * facts.largest_block(*span)
    head = facts.embedding_elements if span.last == facts.config.n_blocks else 0
    return max(block, head) * DTYPES[dtype]
