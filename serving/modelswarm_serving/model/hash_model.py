"""A model without weights: every block maps a row, its position and all earlier KV to an integer hash.

Exact equality of tokens then proves that state was right: a wrong, missing, repeated or stale row, position, page or
log entry changes every later token. Used by the protocol tests, the simulator and `modelswarm-server --hash-model`;
the core drives it as it drives a transformer span. Knows nothing of sessions.

KV lives in page slots and is read only through `Work.pages`. A slot holds a hash that has the position in it, as a
key has under rotary embedding, and attention is the sum over the slots of all earlier positions.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Sequence

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import (
    KvRead,
    KvWrite,
    ModelShape,
    Pick,
    Picked,
    Result,
    Task,
    Work,
)

MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """The finalizer of splitmix64: every input bit reaches every output bit."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def embed(token: int) -> int:
    return mix(mix(token) ^ 0x656D626564)


def key_value(block: int, position: int, row: int) -> int:
    """What a block stores for a position."""
    return mix(row + mix(block * 0x1F123BB5 + (position << 20)))


def output(stored: int, attention: int) -> int:
    """A block's output row, of its own KV and the sum of all earlier KV."""
    return mix(stored ^ mix(attention))


def pick(
    row: int, sampling: Sampling, position: int, log: Sequence[int], vocabulary: int
) -> Picked:
    """The next token, of the last block's row, what the request asked for, and the whole log copy."""
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
    return Picked(value % vocabulary, -((value >> 32) % 1000) / 100)


def reference(
    tokens: Sequence[int],
    sampling: Sampling,
    n_new: int,
    end: int,
    *,
    n_blocks: int,
    vocabulary: int,
) -> list[int]:
    """The oracle: up to `n_new` tokens after `tokens`, computed without pages, spans or steps.

    Stops as the tail does: after a token of `sampling.eos`, or when the log has `end` entries.
    """
    log = list(tokens)
    sums = [0] * n_blocks
    new: list[int] = []
    for position in range(end - 1):
        row = embed(log[position])
        for block in range(n_blocks):
            stored = key_value(block, position, row)
            row = output(stored, sums[block])
            sums[block] = (sums[block] + stored) & MASK
        if position + 1 < len(log):
            continue
        if len(new) == n_new:
            break
        new.append(pick(row, sampling, position + 1, log, vocabulary).token)
        log.append(new[-1])
        if new[-1] in sampling.eos:
            break
    return new


class HashModel:
    """Blocks [first, last) of the hash model; a row is its hash, repeated to fill `row_bytes`."""

    def __init__(self, shape: ModelShape) -> None:
        if shape.row_bytes < 8 or shape.row_bytes % 8:
            raise ValueError(f"row_bytes is {shape.row_bytes}; a multiple of 8 is wanted")
        self._shape = shape
        self._words = shape.row_bytes // 8
        # block -> page -> slots; a page is made when it is first written
        self._kv: dict[int, dict[int, list[int]]] = {
            block: {} for block in range(shape.first, shape.last)
        }

    @property
    def shape(self) -> ModelShape:
        return self._shape

    def step(self, batch: Sequence[Task]) -> list[Result]:
        return [self._task(task) for task in batch]

    def _task(self, task: Task) -> Result:
        match task:
            case KvRead():
                return Result(rows=self._read(task))
            case KvWrite():
                self._write(task)
                return Result()
            case Work():
                return self._run(task)

    def _read(self, read: KvRead) -> bytes:
        self._check_copy(read)
        size = self._shape.page_size
        values = [
            self._kv[block][read.pages[position // size]][position % size]
            for position in range(read.first, read.first + read.count)
            for block in range(*read.blocks)
        ]
        return struct.pack(f"<{len(values)}Q", *values)

    def _write(self, write: KvWrite) -> None:
        self._check_copy(write)
        size = self._shape.page_size
        values = iter(struct.unpack(f"<{len(write.kv) // 8}Q", write.kv))
        for position in range(write.first, write.first + write.count):
            for block in range(*write.blocks):
                page = self._kv[block].setdefault(write.pages[position // size], [0] * size)
                page[position % size] = next(values)

    def _check_copy(self, copy: KvRead | KvWrite) -> None:
        """What no core may ever ask of a model."""
        shape, end = self._shape, copy.first + copy.count
        if copy.count <= 0 or copy.first < 0 or len(copy.pages) * shape.page_size < end:
            raise ValueError(f"KV of positions {copy.first} to {end} in {len(copy.pages)} pages")
        if not shape.first <= copy.blocks[0] < copy.blocks[1] <= shape.last:
            raise ValueError(f"blocks {copy.blocks} are not held here")
        wanted = copy.count * (copy.blocks[1] - copy.blocks[0]) * shape.kv_bytes
        if isinstance(copy, KvWrite) and len(copy.kv) != wanted:
            raise ValueError(f"{len(copy.kv)} bytes of KV where {wanted} are wanted")

    def _run(self, work: Work) -> Result:
        self._check(work)
        rows = self._inputs(work)
        for block in range(*work.blocks):
            rows = self._block(block, work, rows)
        emitted = rows[work.emit - work.first :]
        picked = None
        if work.pick is not None:
            picked = self._pick(work.pick, rows[-1])
        return Result(rows=self._pack(emitted) if emitted else None, picked=picked)

    def _check(self, work: Work) -> None:
        """What no core may ever ask of a model."""
        end = work.first + work.count
        shape = self._shape
        if work.count <= 0 or work.first < 0 or not work.first <= work.emit <= end:
            raise ValueError(f"work for rows {work.first} to {end}, emitted from {work.emit}")
        if len(work.pages) * shape.page_size < end:
            raise ValueError(f"{len(work.pages)} pages do not hold {end} positions")
        if not shape.first <= work.blocks[0] < work.blocks[1] <= shape.last:
            raise ValueError(f"blocks {work.blocks} are not held here")
        if (work.tokens is not None) != (work.blocks[0] == 0):
            raise ValueError("tokens are for block 0 and only for it")
        if work.pick is not None and not work.pick.position == end == len(work.pick.log):
            raise ValueError(
                f"entry {work.pick.position} is to be picked after row {end - 1} "
                f"with a log of {len(work.pick.log)}"
            )

    def _inputs(self, work: Work) -> list[int]:
        if work.tokens is not None:
            if work.rows is not None or len(work.tokens) != work.count:
                raise ValueError(f"{len(work.tokens)} tokens for {work.count} rows")
            return [embed(token) for token in work.tokens]
        if work.rows is None or len(work.rows) != work.count * self._shape.row_bytes:
            raise ValueError(f"no {work.count} rows of {self._shape.row_bytes} bytes")
        words = struct.unpack(f"<{work.count * self._words}Q", work.rows)
        if self._words == 1:
            return list(words)
        return [
            self._fold(words[at : at + self._words]) for at in range(0, len(words), self._words)
        ]

    def _fold(self, words: Sequence[int]) -> int:
        """The hash that was repeated; something else if any word of the row was damaged."""
        if all(word == words[0] for word in words):
            return words[0]
        value = 0
        for word in words:
            value = mix(value ^ word)
        return value

    def _pack(self, rows: list[int]) -> bytes:
        if self._words > 1:
            rows = [row for row in rows for _ in range(self._words)]
        return struct.pack(f"<{len(rows)}Q", *rows)

    def _block(self, block: int, work: Work, rows: list[int]) -> list[int]:
        size = self._shape.page_size
        pages = self._kv[block]
        attention = self._attention(pages, work)
        out = []
        for position, row in enumerate(rows, work.first):
            stored = key_value(block, position, row)
            out.append(output(stored, attention))
            attention = (attention + stored) & MASK
            page = work.pages[position // size]
            slots = pages.get(page)
            if slots is None:
                slots = pages[page] = [0] * size
            slots[position % size] = stored
        return out

    def _attention(self, pages: dict[int, list[int]], work: Work) -> int:
        """The sum over the slots of positions < first. A page that nobody wrote counts as zeros."""
        size = self._shape.page_size
        whole, rest = divmod(work.first, size)
        empty = [0] * size
        total = sum(sum(pages.get(page, empty)) for page in work.pages[:whole])
        if rest:
            total += sum(pages.get(work.pages[whole], empty)[:rest])
        return total & MASK

    def _pick(self, wanted: Pick, row: int) -> Picked:
        return pick(row, wanted.sampling, wanted.position, wanted.log, self._shape.vocab_size)
