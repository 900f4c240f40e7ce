"""A model without weights: every block maps a row, its position and all earlier KV to an integer hash.

Equal tokens then prove that all state was right: a wrong, missing, repeated or stale row, position, page or log entry
changes every later token. Used by the protocol tests, the simulator and `modelswarm-server --hash-model`; the core
drives it as it drives a transformer span. Knows nothing of sessions.

KV lies in page slots and is read only through `BatchItem.pages`. The hash in a slot depends on the position, like a key
under rotary embedding. Attention is the sum over the slots of all earlier positions.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache
from operator import attrgetter

from modelswarm.protocol.messages import Adapter, PromptLogprob, Sampling, TopLogprob
from modelswarm_serving.model.base import (
    BatchItem,
    Compute,
    KvCopy,
    KvRead,
    KvWrite,
    ModelShape,
    Result,
    ReturnRequest,
    SampledToken,
    SampleRequest,
    ScoreRequest,
    Task,
)

MASK = (1 << 64) - 1
_RULES = attrgetter(
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "no_repeat_ngram_size",
    "logit_bias",
    "bad_words",
    "min_tokens",
    "allowed_tokens",
)
_NO_RULES = _RULES(Sampling())


def mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def embed(token: int) -> int:
    return mix(mix(token) ^ 0x656D626564)


def key_value(block: int, position: int, row: int, adapter: str = "") -> int:
    """Return the value that a block stores for a position."""
    value = mix(row + mix(block * 0x1F123BB5 + (position << 20)))
    return mix(value ^ adapter_hash(adapter)) if adapter else value


@cache
def adapter_hash(adapter: str) -> int:
    return int.from_bytes(hashlib.blake2b(adapter.encode(), digest_size=8).digest(), "little")


def output(stored: int, attention: int) -> int:
    """Return a block's output row, computed from its own KV and the sum of all earlier KV."""
    return mix(stored ^ mix(attention))


def sample_token(
    row: int, sampling: Sampling, position: int, log: Sequence[int], begin: int, vocabulary: int
) -> SampledToken:
    """Return the next token, a function of the last block's row, the sampling parameters, the whole log and `begin`.

    allowed_tokens, min_tokens, logprobs and grammar have their own effects. Other parameters, if any is set, change the
    hash, together with `begin`: a lost or stale turn then shows in the next token.
    """
    forced = forced_token(sampling, log, begin, vocabulary)
    if forced is not None and sampling.grammar is not None and sampling.grammar.max_forced:
        return SampledToken(forced, 0.0)  # with or without a step of its own
    digest = hashlib.blake2b(array("q", log).tobytes(), digest_size=8).digest()
    value = mix(row ^ mix(int.from_bytes(digest, "little") ^ mix(position)))
    if sampling.temperature > 0:
        wanted = struct.pack(
            "<4dqQq",
            sampling.temperature,
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            sampling.top_k,
            sampling.seed & MASK,
            sampling.choice,
        )
        digest = hashlib.blake2b(wanted, digest_size=8).digest()
        value = mix(value ^ int.from_bytes(digest, "little"))
    rules = _RULES(sampling)
    if rules != _NO_RULES:
        digest = hashlib.blake2b(repr((rules, begin)).encode(), digest_size=8).digest()
        value = mix(value ^ int.from_bytes(digest, "little"))
    banned = sampling.eos if len(log) - begin < sampling.min_tokens else ()
    token = _choose_token(value, sampling, banned, vocabulary) if forced is None else forced
    logprob = -((value >> 32) % 1000) / 100
    count = min(sampling.logprobs, vocabulary)
    top = tuple(TopLogprob((token + i) % vocabulary, logprob - i) for i in range(count))
    return SampledToken(token, logprob, top)


def _choose_token(value: int, sampling: Sampling, banned: Sequence[int], vocabulary: int) -> int:
    """Return the first token from the hash onwards that is allowed and not banned; the hash's if there is none."""
    choices = [token for token in sampling.allowed_tokens if token < vocabulary]
    size = len(choices) or vocabulary
    for step in range(size):
        at = (value + step) % size
        token = choices[at] if choices else at
        if token not in banned:
            return token
    return choices[value % size] if choices else value % size


def forced_token(sampling: Sampling, log: Sequence[int], begin: int, vocabulary: int) -> int | None:
    """Return the only token that the turn's grammar allows after `log`; None if it allows several.

    Two of three tokens are forced, each by what the turn has generated so far. None of them ends the sequence.
    """
    if sampling.grammar is None:
        return None
    state = repr((sampling.grammar.text, begin, *log[begin:])).encode()
    value = int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little")
    token = (value >> 8) % vocabulary
    return None if value % 3 == 0 or token in sampling.eos else token


def forced_after(request: SampleRequest, token: int, vocabulary: int) -> tuple[int, ...]:
    """Return the tokens that must follow the sampled one, at most as many as requested."""
    if token in request.sampling.eos:
        return ()
    log = [*request.log, token]
    end = len(log) + request.max_forced
    while len(log) < end:
        forced = forced_token(request.sampling, log, request.begin, vocabulary)
        if forced is None:
            break
        log.append(forced)
    return tuple(log[request.position + 1 :])


def score_token(row: int, token: int, top: int, vocabulary: int) -> PromptLogprob:
    """Return the log probability of the log entry after `row`, a function of both."""
    value = mix(row ^ mix(token ^ 0x73636F7265))
    logprob = -((value >> 32) % 1000) / 100
    others = tuple(
        TopLogprob((value + i) % vocabulary, logprob - i) for i in range(min(top, vocabulary))
    )
    return PromptLogprob(token, logprob, others)


def reference_tokens(
    tokens: Sequence[int],
    sampling: Sampling,
    n_new: int,
    end: int,
    *,
    n_blocks: int,
    vocabulary: int,
    adapter: str = "",
) -> list[int]:
    """Return up to `n_new` tokens after `tokens`, computed without pages, spans or steps: the oracle of the tests.

    Stops as the tail does: after a token of `sampling.eos`, or when the log has `end` entries.
    """
    log = list(tokens)
    sums = [0] * n_blocks
    new: list[int] = []
    for position in range(end - 1):
        row = embed(log[position])
        for block in range(n_blocks):
            stored = key_value(block, position, row, adapter)
            row = output(stored, sums[block])
            sums[block] = (sums[block] + stored) & MASK
        if position + 1 < len(log):
            continue
        if len(new) == n_new:
            break
        new.append(sample_token(row, sampling, position + 1, log, len(tokens), vocabulary).token)
        log.append(new[-1])
        if new[-1] in sampling.eos:
            break
    return new


class HashModel:
    """Blocks [first, last) of the hash model; a row is its hash, repeated to fill `row_bytes`."""

    def __init__(self, shape: ModelShape, adapters: Collection[Adapter] = ()) -> None:
        if shape.row_bytes < 8 or shape.row_bytes % 8:
            raise ValueError(f"row_bytes is {shape.row_bytes}; it must be a multiple of 8")
        self._shape = shape
        self._adapters = adapters
        self._words = shape.row_bytes // 8
        # block -> page -> slots; a page is created by its first write
        self._kv: dict[int, dict[int, list[int]]] = {
            block: {} for block in range(shape.first, shape.last)
        }

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def adapters(self) -> Collection[Adapter]:
        return self._adapters

    @property
    def compute(self) -> Compute:
        return Compute()

    @property
    def grammars(self) -> None:
        """None: its tokens are no text."""
        return None

    def prepare_thread(self) -> None:
        """Do nothing: a thread needs no set-up."""

    def step(self, batch: Sequence[Task]) -> list[Result]:
        return [self._run_task(task) for task in batch]

    def _run_task(self, task: Task) -> Result:
        match task:
            case KvRead():
                return Result(rows=self._read_kv(task))
            case KvWrite():
                self._write_kv(task)
                return Result()
            case KvCopy():
                read = KvRead(task.source, task.first, task.count, task.blocks)
                copy = self._read_kv(read)
                self._write_kv(KvWrite(task.pages, task.first, task.count, task.blocks, copy))
                return Result()
            case BatchItem():
                return self._run_item(task)

    def _read_kv(self, read: KvRead) -> bytes:
        self._check_kv_task(read)
        size = self._shape.page_size
        values = [
            self._kv[block][read.pages[position // size]][position % size]
            for position in range(read.first, read.first + read.count)
            for block in range(*read.blocks)
        ]
        return struct.pack(f"<{len(values)}Q", *values)

    def _write_kv(self, write: KvWrite) -> None:
        self._check_kv_task(write)
        size = self._shape.page_size
        values = iter(struct.unpack(f"<{len(write.kv) // 8}Q", write.kv))
        for position in range(write.first, write.first + write.count):
            for block in range(*write.blocks):
                page = self._kv[block].setdefault(write.pages[position // size], [0] * size)
                page[position % size] = next(values)

    def _check_kv_task(self, task: KvRead | KvWrite) -> None:
        """Raise ValueError for KV tasks that a correct core never plans."""
        shape, end = self._shape, task.first + task.count
        if task.count <= 0 or task.first < 0 or len(task.pages) * shape.page_size < end:
            raise ValueError(f"KV of positions {task.first} to {end} in {len(task.pages)} pages")
        if not shape.first <= task.blocks[0] < task.blocks[1] <= shape.last:
            raise ValueError(f"blocks {task.blocks} are not held here")
        wanted = task.count * (task.blocks[1] - task.blocks[0]) * shape.kv_bytes
        if isinstance(task, KvWrite) and len(task.kv) != wanted:
            raise ValueError(f"{len(task.kv)} bytes of KV; expected: {wanted}")

    def _run_item(self, item: BatchItem) -> Result:
        self._check_item(item)
        rows = self._input_rows(item)
        for place, block in enumerate(range(*item.blocks)):
            rows = self._run_block(block, item, self._add_prompts(place, item, rows))
        emitted = rows[item.emit_from - item.first :]
        picked = None
        if item.sample is not None:
            picked = self._sample(item.sample, rows[-1])
        scores = () if item.score is None else self._score(item.score, rows)
        packed = self._pack_rows(emitted) if emitted else None
        returned = b"" if item.returned is None else self._return_rows(item.returned, item, rows)
        return Result(rows=packed, sampled=picked, scores=scores, returned=returned)

    def _return_rows(self, wanted: ReturnRequest, item: BatchItem, rows: list[int]) -> bytes:
        """Return the rows themselves as hidden states. Their hash is no distribution, so there are no logits."""
        if wanted.logits or not item.first <= wanted.first < item.first + item.count:
            raise ValueError(f"{wanted} of rows {item.first} to {item.first + item.count}")
        return self._pack_rows(rows[wanted.first - item.first :])

    def _score(self, score: ScoreRequest, rows: Sequence[int]) -> tuple[PromptLogprob, ...]:
        vocabulary = self._shape.vocab_size
        return tuple(
            score_token(row, token, score.top, vocabulary)
            for row, token in zip(rows, score.targets, strict=False)
        )

    def _check_item(self, item: BatchItem) -> None:
        """Raise ValueError for batch items that a correct core never plans."""
        end = item.first + item.count
        shape = self._shape
        if item.count <= 0 or item.first < 0 or not item.first <= item.emit_from <= end:
            raise ValueError(f"work for rows {item.first} to {end}, emitted from {item.emit_from}")
        if len(item.pages) * shape.page_size < end:
            raise ValueError(f"{len(item.pages)} pages do not hold {end} positions")
        if not shape.first <= item.blocks[0] < item.blocks[1] <= shape.last:
            raise ValueError(f"blocks {item.blocks} are not held here")
        takes_tokens = item.blocks[0] == 0 and not item.is_range_end
        if (item.tokens is not None) != takes_tokens:
            raise ValueError("tokens are for block 0 and only for it")
        if item.adapter and all(item.adapter != each.name for each in self._adapters):
            raise ValueError(f"{item.adapter} is not an adapter of this model")
        if item.sample is not None and not item.sample.position == end == len(item.sample.log):
            raise ValueError(
                f"entry {item.sample.position} is to be picked after row {end - 1} "
                f"with a log of {len(item.sample.log)}"
            )

    def _input_rows(self, item: BatchItem) -> list[int]:
        if item.tokens is not None:
            if item.rows is not None or len(item.tokens) != item.count:
                raise ValueError(f"{len(item.tokens)} tokens for {item.count} rows")
            rows = [embed(token) for token in item.tokens]
            for position, row in item.opaque.items():
                rows[position - item.first] = self._opaque_row(row)
            return rows
        if item.rows is None or len(item.rows) != item.count * self._shape.row_bytes:
            raise ValueError(f"no {item.count} rows of {self._shape.row_bytes} bytes")
        words = struct.unpack(f"<{item.count * self._words}Q", item.rows)
        if self._words == 1:
            return list(words)
        return [
            self._fold_words(words[at : at + self._words])
            for at in range(0, len(words), self._words)
        ]

    def _add_prompts(self, place: int, item: BatchItem, rows: list[int]) -> list[int]:
        """Add the rows of the block at `place` of the item's blocks."""
        size = self._shape.row_bytes
        for position, prompts in item.prompts.items():
            if len(prompts) != size * (item.blocks[1] - item.blocks[0]):
                raise ValueError(f"{len(prompts)} bytes of prompts for blocks {item.blocks}")
            added = self._opaque_row(prompts[size * place : size * (place + 1)])
            at = position - item.first
            rows[at] = (rows[at] + added) & MASK
        return rows

    def _opaque_row(self, row: bytes) -> int:
        return self._fold_words(struct.unpack(f"<{self._words}Q", row))

    def _fold_words(self, words: Sequence[int]) -> int:
        """Return the repeated hash; another value if any word of the row was damaged."""
        if all(word == words[0] for word in words):
            return words[0]
        value = 0
        for word in words:
            value = mix(value ^ word)
        return value

    def _pack_rows(self, rows: list[int]) -> bytes:
        if self._words > 1:
            rows = [row for row in rows for _ in range(self._words)]
        return struct.pack(f"<{len(rows)}Q", *rows)

    def _run_block(self, block: int, item: BatchItem, rows: list[int]) -> list[int]:
        size = self._shape.page_size
        pages = self._kv[block]
        attention = self._attention_sum(pages, item)
        out = []
        for position, row in enumerate(rows, item.first):
            stored = key_value(block, position, row, item.adapter)
            out.append(output(stored, attention))
            attention = (attention + stored) & MASK
            page = item.pages[position // size]
            slots = pages.get(page)
            if slots is None:
                slots = pages[page] = [0] * size
            slots[position % size] = stored
        return out

    def _attention_sum(self, pages: dict[int, list[int]], item: BatchItem) -> int:
        """Return the sum over the slots of positions < first. A page without writes counts as zeros."""
        size = self._shape.page_size
        whole, rest = divmod(item.first, size)
        empty = [0] * size
        total = sum(sum(pages.get(page, empty)) for page in item.pages[:whole])
        if rest:
            total += sum(pages.get(item.pages[whole], empty)[:rest])
        return total & MASK

    def _sample(self, request: SampleRequest, row: int) -> SampledToken:
        vocabulary = self._shape.vocab_size
        sampled = sample_token(
            row, request.sampling, request.position, request.log, request.begin, vocabulary
        )
        return replace(sampled, forced=forced_after(request, sampled.token, vocabulary))
