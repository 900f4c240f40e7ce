"""A span of transformer blocks as a `Model`: rows or tokens in, rows or sampled tokens out, KV in pages.

Made by `load_span` (`startup.py`); the engine thread calls `step`. `loading.py` loads the blocks, `step_layout.py` has
the packed layout. Knows no sessions: a batch item names pages, positions and rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from modelswarm.placement.memory import LOGIT_ROWS, sample_rows
from modelswarm.protocol.messages import Adapter, FaultKind, PromptLogprob
from modelswarm_serving.model.adapters.lora import adapter_context
from modelswarm_serving.model.adapters.table import NO_ADAPTERS, AdapterTable
from modelswarm_serving.model.attention.attention import SDPA, attention_context
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.staging import current_device, to_device, to_host, to_index
from modelswarm_serving.model.attention.step_layout import Blocks, StepLayout
from modelswarm_serving.model.base import (
    NO_GRAMMARS,
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
from modelswarm_serving.model.device import HOST, Device, run_on
from modelswarm_serving.model.grammar.matchers import GrammarFault, GrammarMatchers
from modelswarm_serving.model.linear.layout_choice import LayoutChoice
from modelswarm_serving.model.linear.layouts import OWN_MODULES, WeightLayout
from modelswarm_serving.model.numerics import numerics_class
from modelswarm_serving.model.passes.contract import PART_ROWS, PassTask
from modelswarm_serving.model.passes.transformer_pass import PassForm, TransformerPass
from modelswarm_serving.model.sampling.device_sampler import sample_rows_on_device
from modelswarm_serving.model.sampling.prompt_scores import read_scores, score_tokens
from modelswarm_serving.model.sampling.sampler import Sampled, Unsampled, sample
from modelswarm_serving.model.transformer.decode_graphs import DecodeGraphs
from modelswarm_serving.model.transformer.loading import LoadedSpan


@dataclass(frozen=True, slots=True)
class PagedKv:
    """The pages of a span, and the ways to attend over them."""

    cache: KvCache
    backend: AttentionBackend = SDPA
    graphs: DecodeGraphs | None = None  # None: no decode step is captured


@dataclass(frozen=True, slots=True)
class SpanHardware:
    """The hardware on which a span computes."""

    device: Device = HOST
    threads: int = 1  # of the CPU
    layout: LayoutChoice | None = None  # of the weights; None: transformers' own modules have them

    def compute(self, kv: PagedKv) -> Compute:
        """Return what metrics and logs tell of it, and of attention over these pages."""
        dtype, attention = str(kv.cache.dtype).removeprefix("torch."), kv.backend.name
        choice = self.layout
        layout = choice.layout if choice is not None else ""
        usual = layout == WeightLayout.TRANSPOSED or not self.device.is_cpu
        numerics = numerics_class(
            self.device,
            dtype,
            layout="" if usual else layout or OWN_MODULES,
            attention="" if self.device.is_cpu else attention,
        )
        measured = {} if choice is None else choice.seconds
        seconds = {str(name): found for name, found in measured.items()}
        return Compute(
            threads=self.threads,
            device=self.device.name,
            dtype=dtype,
            numerics=numerics,
            layout=layout,
            attention=attention,
            decode_graphs=kv.graphs is not None,
            layout_seconds=seconds,
        )


class TransformerSpan:
    """Blocks [first, last) of one model. Not thread-safe: one step at a time."""

    def __init__(
        self,
        loaded: LoadedSpan,
        blocks: Blocks,
        shape: ModelShape,
        kv: PagedKv,
        hardware: SpanHardware,
        grammars: GrammarMatchers | None = None,
        adapters: AdapterTable = NO_ADAPTERS,
    ) -> None:
        self._loaded = loaded
        self._hidden_size: int = loaded.config.hidden_size
        self._blocks = blocks
        self._shape = shape
        self._cache, self._backend, self._graphs = kv.cache, kv.backend, kv.graphs
        self._hardware, self._compute = hardware, hardware.compute(kv)
        self._grammars = grammars
        self._adapters = adapters
        self._dtype = kv.cache.dtype
        self._device = kv.cache.device

    @property
    def shape(self) -> ModelShape:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def adapters(self) -> Collection[Adapter]:
        return self._adapters.adapters

    @property
    def compute(self) -> Compute:
        return self._compute

    @property
    def grammars(self) -> GrammarMatchers | None:
        return self._grammars

    def start_pass(
        self, task: PassTask, data: bytes | bytearray, part_rows: int = PART_ROWS
    ) -> TransformerPass:
        """Return a pass through these blocks (`PassRunner`)."""
        form = PassForm(self._shape, self._dtype, self._hardware.device, part_rows)
        return TransformerPass(self._blocks, form, task, data)

    def prepare_thread(self) -> None:
        """Set the number of threads, which torch keeps per thread: without, matrix products here take all CPUs."""
        torch.set_num_threads(self._hardware.threads)

    @torch.inference_mode()
    def step(self, batch: Sequence[Task]) -> list[Result]:
        """Run the tasks; OutOfDeviceMemory if the device has too little memory for all of them at once.

        DeviceError if the device can do no more.
        """
        return run_on(self._hardware.device, lambda: self._run_tasks(batch))

    def _run_tasks(self, batch: Sequence[Task]) -> list[Result]:
        """Run items with the same blocks as one packed batch; return results in the order of `batch`."""
        results: list[Result] = [Result(error=self._range_fault(task)) for task in batch]
        groups: dict[tuple[int, int, bool], list[tuple[int, BatchItem]]] = {}
        for i, task in enumerate(batch):
            if results[i].error is not None:
                continue
            if not isinstance(task, BatchItem):
                results[i] = self._run_kv_task(task)
            elif (fault := self._input_fault(task)) is not None:
                results[i] = Result(error=fault)
            else:
                groups.setdefault((*task.blocks, task.is_range_end), []).append((i, task))
        for blocks, members in groups.items():
            with current_device(self._device):
                outcome = self._run_items([work for _, work in members], *blocks)
            for (i, _), result in zip(members, outcome, strict=True):
                results[i] = result
        return results

    def _run_kv_task(self, task: KvRead | KvWrite | KvCopy) -> Result:
        own = self._shape.first
        blocks = slice(task.blocks[0] - own, task.blocks[1] - own)
        if isinstance(task, KvCopy):
            self._cache.copy_kv(task.source, task.pages, task.first, task.count, blocks)
            return Result()
        if isinstance(task, KvRead):
            return Result(rows=self._cache.read_kv(task.pages, task.first, task.count, blocks))
        wanted = task.count * (task.blocks[1] - task.blocks[0]) * self._shape.kv_bytes
        if len(task.kv) != wanted:
            return Result(error=f"{len(task.kv)} bytes of KV came, {wanted} are needed")
        self._cache.write_kv(task.pages, task.first, task.count, blocks, task.kv)
        return Result()

    def _range_fault(self, task: Task) -> str | None:
        """Return the fault of a task outside the span, its context or its pages; the other tasks still run."""
        shape = self._shape
        start, end = task.blocks
        if not shape.first <= start < end <= shape.last:
            return f"blocks {start}:{end} are not within {shape.first}:{shape.last}"
        if task.first < 0 or task.count < 1 or task.first + task.count > shape.max_length:
            return f"positions {task.first}+{task.count} are not within 0:{shape.max_length}"
        for pages in (task.pages, task.source) if isinstance(task, KvCopy) else (task.pages,):
            if len(pages) * shape.page_size < task.first + task.count:
                return f"{len(pages)} pages do not hold {task.first + task.count} positions"
            used = pages[: -(-(task.first + task.count) // shape.page_size)]
            if min(used) < 0 or max(used) >= shape.total_pages:
                return f"pages must be within 0:{shape.total_pages}"
        return None

    def _input_fault(self, item: BatchItem) -> str | None:
        shape = self._shape
        if not self._adapters.has(item.adapter):
            return f"there is no adapter {item.adapter} here"
        size = shape.row_bytes * (item.blocks[1] - item.blocks[0])
        if any(len(rows) != size for rows in item.prompts.values()):
            return f"prompts of {size} bytes are needed"
        takes_tokens = item.blocks[0] == 0 and not item.is_range_end
        if (item.tokens is not None) != takes_tokens:
            return "tokens enter at block 0, rows at every other"
        if item.tokens is not None:
            return self._token_fault(item.tokens, item.count)
        if item.rows is None or len(item.rows) != item.count * shape.row_bytes:
            return f"{item.count} rows of {shape.row_bytes} bytes are needed"
        return None

    def _token_fault(self, tokens: Sequence[int], count: int) -> str | None:
        vocab = self._shape.vocab_size
        if len(tokens) != count:
            return f"{count} tokens are needed, not {len(tokens)}"
        if min(tokens) < 0 or max(tokens) >= vocab:
            return f"tokens must be within 0:{vocab}"
        return None

    def _run_items(
        self, items: Sequence[BatchItem], first: int, last: int, is_range_end: bool
    ) -> list[Result]:
        layout = StepLayout(items, self._cache)
        has_tokens = first == 0 and not is_range_end
        rows = self._embed(layout) if has_tokens else self._unpack(layout.items)
        rows = self._run_blocks(rows, layout, first, last)
        is_tail = last == self._shape.n_blocks and not is_range_end
        results = self._sample(rows, layout) if is_tail else self._pack_rows(rows, layout)
        return [results[id(work)] for work in items]

    def _run_blocks(self, rows: Tensor, layout: StepLayout, first: int, last: int) -> Tensor:
        shape = self._shape
        is_whole = (first, last) == (shape.first, shape.last)
        groups = self._adapters.groups_of(layout, self._device)
        prompts = self._block_prompts(layout, last - first)
        # Captured steps have neither adapters nor prompts.
        is_captured = is_whole and not groups and prompts is None
        if is_captured and self._graphs is not None and self._graphs.can_run(layout):
            return self._graphs.run(rows, layout)
        with (
            attention_context(layout, self._cache, backend=self._backend),
            adapter_context(groups, layout.rows),
        ):
            run = self._blocks.run
            if prompts is None:
                return run(rows, layout, first - shape.first, last - shape.first)
            places, added = prompts
            for place, block in enumerate(range(first - shape.first, last - shape.first)):
                rows = rows.index_add(0, places, added[:, place])
                rows = run(rows, layout, block, block + 1)
            return rows

    def _embed(self, layout: StepLayout) -> Tensor:
        tokens = [token for work in layout.items for token in work.tokens or ()]
        assert self._loaded.embed is not None
        ids = to_index(tokens, self._device)
        return self._loaded.embed(ids, layout.positions, self._opaque_rows(layout))

    def _opaque_rows(self, layout: StepLayout) -> tuple[Tensor, Tensor] | None:
        """Return places, and the rows in place of their embeddings (R14, opaque rows); None if there are none."""
        found = {
            start + position - work.first: row
            for start, work in zip(layout.starts, layout.items, strict=True)
            for position, row in work.opaque.items()
        }
        if not found:
            return None
        rows = torch.frombuffer(bytearray().join(found.values()), dtype=self._dtype)
        rows = rows.view(-1, self._hidden_size)
        return to_index(list(found), self._device), to_device(rows, self._device)

    def _block_prompts(self, layout: StepLayout, blocks: int) -> tuple[Tensor, Tensor] | None:
        """Return places, and what is added there, [places, blocks, hidden] (R14, opaque rows); None if nothing is."""
        found = {
            start + position - work.first: rows
            for start, work in zip(layout.starts, layout.items, strict=True)
            if work.prompts
            for position, rows in work.prompts.items()
        }
        if not found:
            return None
        rows = torch.frombuffer(bytearray().join(found.values()), dtype=self._dtype)
        rows = rows.view(len(found), blocks, self._hidden_size)
        return to_index(list(found), self._device), to_device(rows, self._device)

    def _unpack(self, items: Sequence[BatchItem]) -> Tensor:
        """Return the raw rows of all items as one tensor."""
        joined = bytearray().join(work.rows for work in items if work.rows is not None)
        rows = torch.frombuffer(joined, dtype=self._dtype)
        return to_device(rows.view(-1, self._hidden_size), self._device)

    def _pack_rows(self, rows: Tensor, layout: StepLayout) -> dict[int, Result]:
        """Return the requested rows of each item as bytes, by the identity of the item."""
        payload = to_host(rows.contiguous().view(torch.uint8)).numpy()
        results: dict[int, Result] = {}
        for row, work in zip(layout.starts, layout.items, strict=True):
            start = row + max(work.emit_from - work.first, 0)
            end = row + work.count
            results[id(work)] = Result(rows=payload[start:end].tobytes() if start < end else None)
        return results

    def _sample(self, rows: Tensor, layout: StepLayout) -> dict[int, Result]:
        """Run norm, head and sampler on the last rows of items with a sample request; other rows are left out."""
        results = {id(work): Result() for work in layout.items}
        asking = [
            (row + work.count - 1, work)
            for row, work in zip(layout.starts, layout.items, strict=True)
            if work.sample is not None
        ]
        picks, faults = self._constrain([work.sample for _, work in asking if work.sample])
        refused = [(asking[place][1], fault) for place, fault in faults.items()]
        asking = [each for place, each in enumerate(asking) if place not in faults]
        everyone = len(asking) == len(rows)  # plain decode
        wanted = rows if everyone else self._pick_rows(rows, [row for row, _ in asking])
        scores = self._score_items(rows, layout)
        for work in layout.items if scores else ():
            results[id(work)] = Result(scores=scores.get(id(work), ()))
        for work, fault in refused:
            results[id(work)] = Result(error=fault, fault=FaultKind.NO_TOKEN)
        sampled = self._sample_rows(wanted, picks)
        for (_, work), pick, picked in zip(asking, picks, sampled, strict=True):
            if isinstance(picked, Unsampled):
                results[id(work)] = Result(error=picked.value, fault=picked.fault)
            else:
                found = scores.get(id(work), ())
                results[id(work)] = Result(sampled=self._add_forced(pick, picked), scores=found)
        for row, work in zip(layout.starts, layout.items, strict=True):
            if work.returned is not None and results[id(work)].error is None:
                part = rows[row + work.returned.first - work.first : row + work.count]
                returned = self._return_rows(part, work.returned)
                results[id(work)] = replace(results[id(work)], returned=returned)
        return results

    def _pick_rows(self, rows: Tensor, places: Sequence[int]) -> Tensor:
        return rows.index_select(0, to_index(places, self._device))

    def _return_rows(self, rows: Tensor, wanted: ReturnRequest) -> bytes:
        """Return logits and normed hidden states of rows [n, hidden] of the last block as bytes, row by row."""
        assert self._loaded.norm is not None
        made = bytearray()
        for start in range(0, len(rows), LOGIT_ROWS):
            part = rows[start : start + LOGIT_ROWS]
            columns = [self.logits(part)] if wanted.logits else []
            if wanted.hidden_states:
                columns.append(self._loaded.norm(part))
            joined = torch.cat([each.to(self._dtype) for each in columns], dim=1).contiguous()
            made += to_host(joined.view(torch.uint8)).numpy().tobytes()
        return bytes(made)

    def _score_items(
        self, rows: Tensor, layout: StepLayout
    ) -> dict[int, tuple[PromptLogprob, ...]]:
        """Return the log probabilities that items ask for, by the identity of the item."""
        asking = {
            id(work): (rows[row : row + len(work.score.targets)], work.score)
            for row, work in zip(layout.starts, layout.items, strict=True)
            if work.score is not None
        }
        if not asking:
            return {}
        tables = [self._score_rows(part, score) for part, score in asking.values()]
        found = read_scores(tables, [score.targets for _, score in asking.values()])
        return dict(zip(asking, found, strict=True))

    def _score_rows(self, rows: Tensor, score: ScoreRequest) -> Tensor:
        """Return the scores of the targets, some rows at a time, as the memory plan counts them."""
        made: list[Tensor] = []
        for start in range(0, len(rows), LOGIT_ROWS):
            logits = self.logits(rows[start : start + LOGIT_ROWS])
            targets = score.targets[start : start + LOGIT_ROWS]
            count = sample_rows(logits.shape[-1]) if self._device.type == "cpu" else LOGIT_ROWS
            for first in range(0, len(targets), count):
                part = slice(first, first + count)
                made.append(score_tokens(logits[part], targets[part], score.top))
        return torch.cat(made)

    def _constrain(
        self, picks: Sequence[SampleRequest]
    ) -> tuple[list[SampleRequest], dict[int, str]]:
        """Return the requests with the masks of their grammars, and the faults of the others by their place."""
        good: list[SampleRequest] = []
        faults: dict[int, str] = {}
        for place, pick in enumerate(picks):
            if pick.sampling.grammar is None:
                good.append(pick)
            elif self._grammars is None:
                faults[place] = NO_GRAMMARS
            else:
                try:
                    good.append(replace(pick, mask=self._grammars.mask(pick)))
                except GrammarFault as fault:
                    faults[place] = str(fault)
        return good, faults

    def _add_forced(self, pick: SampleRequest, picked: SampledToken) -> SampledToken:
        """Return the token with those that its grammar forces after it."""
        if self._grammars is None or not pick.max_forced:
            return picked
        return replace(picked, forced=self._grammars.forced_after(pick, picked.token))

    def _sample_rows(self, rows: Tensor, picks: Sequence[SampleRequest]) -> list[Sampled]:
        """Return a token for each of these rows of the last block."""
        if not picks:
            return []
        if self._device.type != "cpu":
            return sample_rows_on_device(rows, self.logits, picks)
        sampled: list[Sampled] = []
        for start in range(0, len(picks), LOGIT_ROWS):
            part = slice(start, start + LOGIT_ROWS)
            sampled += _sample_parts(self.logits(rows[part]), picks[part])
        return sampled

    def logits(self, rows: Tensor) -> Tensor:
        """Apply final norm and head to rows [n, hidden] of the last block; tail only."""
        assert self._loaded.norm is not None and self._loaded.head is not None
        logits = self._loaded.head.multiply(self._loaded.norm(rows))
        if self._loaded.logit_scale != 1.0:
            logits = logits * self._loaded.logit_scale
        if self._loaded.softcap is not None:
            logits = torch.tanh(logits / self._loaded.softcap) * self._loaded.softcap
        return logits


def _sample_parts(logits: Tensor, picks: Sequence[SampleRequest]) -> list[Sampled]:
    """Sample some rows at a time, so that the sampler's tables have the size that the memory plan counts."""
    count = sample_rows(logits.shape[-1])
    return [
        sampled
        for start in range(0, len(picks), count)
        for sampled in sample(logits[start : start + count], picks[start : start + count])
    ]
