"""A span of transformer blocks as a `Model`: rows or tokens in, rows or picks out, KV in pages.

Made by `load_span` (`startup.py`); the engine thread calls `step`. What a session is, is not known here: a Work names
pages, positions and rows. See `loading.py` for how the blocks get here, `batch.py` for the packed layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from modelswarm_serving.model.attention.attention import attending
from modelswarm_serving.model.attention.kv_cache import PagePool
from modelswarm_serving.model.attention.step_layout import Batch
from modelswarm_serving.model.base import KvRead, KvWrite, ModelShape, Result, Task, Work
from modelswarm_serving.model.sampling.sampler import sample
from modelswarm_serving.model.transformer.fusion import Blocks
from modelswarm_serving.model.transformer.loading import LoadedSpan


class TransformerSpan:
    """Blocks [first, last) of one model. Not thread-safe: one step at a time."""

    def __init__(
        self, loaded: LoadedSpan, blocks: Blocks, pool: PagePool, shape: ModelShape
    ) -> None:
        self._loaded = loaded
        self._blocks = blocks
        self._pool = pool
        self._shape = shape
        self._dtype = pool.dtype
        self._device = pool.device

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @torch.inference_mode()
    def step(self, batch: Sequence[Task]) -> list[Result]:
        """Works with the same blocks run as one packed batch; results in the order of `batch`."""
        results: list[Result] = [Result(error=self._place_fault(task)) for task in batch]
        groups: dict[tuple[int, int], list[tuple[int, Work]]] = {}
        for i, task in enumerate(batch):
            if results[i].error is not None:
                continue
            if not isinstance(task, Work):
                results[i] = self._copy(task)
            elif (fault := self._fault(task)) is not None:
                results[i] = Result(error=fault)
            else:
                groups.setdefault(task.blocks, []).append((i, task))
        for blocks, members in groups.items():
            outcome = self._run([work for _, work in members], *blocks)
            for (i, _), result in zip(members, outcome, strict=True):
                results[i] = result
        return results

    def _copy(self, task: KvRead | KvWrite) -> Result:
        own = self._shape.first
        blocks = slice(task.blocks[0] - own, task.blocks[1] - own)
        if isinstance(task, KvRead):
            return Result(rows=self._pool.read(task.pages, task.first, task.count, blocks))
        wanted = task.count * (task.blocks[1] - task.blocks[0]) * self._shape.kv_bytes
        if len(task.kv) != wanted:
            return Result(error=f"{len(task.kv)} bytes of KV came, {wanted} are needed")
        self._pool.write(task.pages, task.first, task.count, blocks, task.kv)
        return Result()

    def _place_fault(self, task: Task) -> str | None:
        """What makes this task alone impossible; the others still run."""
        shape = self._shape
        start, end = task.blocks
        if not shape.first <= start < end <= shape.last:
            return f"blocks {start}:{end} are not within {shape.first}:{shape.last}"
        if task.first < 0 or task.count < 1 or task.first + task.count > shape.max_length:
            return f"positions {task.first}+{task.count} are not within 0:{shape.max_length}"
        if len(task.pages) * shape.page_size < task.first + task.count:
            return f"{len(task.pages)} pages do not hold {task.first + task.count} positions"
        used = task.pages[: -(-(task.first + task.count) // shape.page_size)]
        if min(used) < 0 or max(used) >= shape.total_pages:
            return f"pages must be within 0:{shape.total_pages}"
        return None

    def _fault(self, work: Work) -> str | None:
        shape, start = self._shape, work.blocks[0]
        if (work.tokens is None) == (start == 0):
            return "tokens enter at block 0, rows at every other"
        if work.tokens is not None:
            return self._token_fault(work.tokens, work.count)
        if work.rows is None or len(work.rows) != work.count * shape.row_bytes:
            return f"{work.count} rows of {shape.row_bytes} bytes are needed"
        return None

    def _token_fault(self, tokens: Sequence[int], count: int) -> str | None:
        vocab = self._shape.vocab_size
        if len(tokens) != count:
            return f"{count} tokens are needed, not {len(tokens)}"
        if min(tokens) < 0 or max(tokens) >= vocab:
            return f"tokens must be within 0:{vocab}"
        return None

    def _run(self, works: Sequence[Work], first: int, last: int) -> list[Result]:
        batch = Batch(works, self._pool)
        rows = self._embed(batch.works) if first == 0 else self._unpack(batch.works)
        with attending(batch, self._pool):
            own = self._shape.first
            rows = self._blocks.run(rows, batch, first - own, last - own)
        is_tail = last == self._shape.n_blocks
        found = self._pick(rows, batch) if is_tail else self._emit(rows, batch)
        return [found[id(work)] for work in works]

    def _embed(self, works: Sequence[Work]) -> Tensor:
        tokens = [token for work in works for token in work.tokens or ()]
        assert self._loaded.embed is not None
        embedded: Tensor = self._loaded.embed(torch.tensor(tokens, device=self._device))
        return embedded

    def _unpack(self, works: Sequence[Work]) -> Tensor:
        """Raw rows of all works, one tensor."""
        joined = bytearray().join(work.rows for work in works if work.rows is not None)
        rows = torch.frombuffer(joined, dtype=self._dtype)
        return rows.view(-1, self._loaded.config.hidden_size).to(self._device)

    def _emit(self, rows: Tensor, batch: Batch) -> dict[int, Result]:
        """The wanted rows of each Work as bytes, by the Work's identity."""
        payload = rows.contiguous().view(torch.uint8).cpu().numpy()
        found: dict[int, Result] = {}
        for row, work in zip(batch.starts, batch.works, strict=True):
            start = row + max(work.emit - work.first, 0)
            end = row + work.count
            found[id(work)] = Result(rows=payload[start:end].tobytes() if start < end else None)
        return found

    def _pick(self, rows: Tensor, batch: Batch) -> dict[int, Result]:
        """Norm, head and sampler on the last rows of the works that ask; prefill rows never get there."""
        found = {id(work): Result() for work in batch.works}
        asking = [
            (row + work.count - 1, work)
            for row, work in zip(batch.starts, batch.works, strict=True)
            if work.pick is not None
        ]
        if asking:
            everyone = len(asking) == len(rows)  # plain decode
            logits = self.logits(rows if everyone else rows[[row for row, _ in asking]])
            picks = [work.pick for _, work in asking if work.pick is not None]
            for (_, work), picked in zip(asking, sample(logits, picks), strict=True):
                error = "the model's logits are not finite" if picked is None else None
                found[id(work)] = Result(picked=picked, error=error)
        return found

    def logits(self, rows: Tensor) -> Tensor:
        """Final norm and head on rows [n, hidden] of the last block; tail only."""
        assert self._loaded.norm is not None and self._loaded.head is not None
        logits: Tensor = self._loaded.norm(rows) @ self._loaded.head
        if self._loaded.softcap is not None:
            logits = torch.tanh(logits / self._loaded.softcap) * self._loaded.softcap
        return logits
