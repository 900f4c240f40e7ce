"""Turns a model folder and options into a ready `TransformerSpan`, or into one clear sentence.

Called by `app.py`. Sizes the KV cache, loads the blocks and runs the self-check. Knows no sockets or sessions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from modelswarm.checkpoint.config.adapter_config import (
    AdapterFacts,
    adapter_revision,
    read_adapter,
    split_modules,
)
from modelswarm.checkpoint.facts import DTYPES, ModelFacts, read_config_and_plan, read_facts
from modelswarm.checkpoint.tokenizer import TOKENIZER_FILE, check_tokenizer
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.placement.memory import (
    PROCESS_BYTES,
    TOKEN_BUDGET,
    MemoryModel,
    adapter_bytes,
    host_memory,
    server_memory,
)
from modelswarm.placement.quantity import human_bytes, limit_at_least
from modelswarm.placement.spans import Span
from modelswarm.process.cpu_limit import usable_cpus
from modelswarm.process.start_progress import ReportProgress, StartPhase, ignore_progress
from modelswarm.protocol.identity import Adapter
from modelswarm.resources.spec import MAX_LORA_RANK
from modelswarm_serving.model.adapters.places import (
    Locate,
    hook_modules,
    locate_fused,
    locate_module,
)
from modelswarm_serving.model.adapters.table import (
    NO_ADAPTERS,
    AdapterTable,
    check_adapter,
    load_weights,
)
from modelswarm_serving.model.attention import backend_names
from modelswarm_serving.model.attention.backend import AttentionBackend, CapturableBackend
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.selection import choose_backend
from modelswarm_serving.model.attention.staging import current_device
from modelswarm_serving.model.attention.step_layout import Blocks
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.device import (
    CUDA,
    HOST,
    Device,
    check_dtype,
    fault_text,
    memory_fault,
)
from modelswarm_serving.model.grammar.matchers import GrammarMatchers
from modelswarm_serving.model.linear.layouts import AUTO
from modelswarm_serving.model.transformer.decode_graphs import DecodeGraphs
from modelswarm_serving.model.transformer.device_pages import (
    check_weights_fit,
    choose_pages,
    measure_room,
    out_of_memory_error,
    probe_pages,
    with_pages,
)
from modelswarm_serving.model.transformer.fusion import FusedBlocks
from modelswarm_serving.model.transformer.loading import LoadedSpan, load_modules
from modelswarm_serving.model.transformer.self_check import SelfCheck, check_decode
from modelswarm_serving.model.transformer.served_blocks import (
    check_layout,
    check_served,
    choose_blocks,
)
from modelswarm_serving.model.transformer.span import PagedKv, SpanHardware, TransformerSpan

log = logging.getLogger(__name__)

_DEFAULT_SESSIONS = 8
"""Default KV room: pages for this many sessions of full length ..."""
_DEFAULT_LIMIT = 1 << 30
"""... but at most this many bytes."""


@dataclass(frozen=True, slots=True)
class SpanOptions:
    """Options of a span; None means the model's value, or a default."""

    dtype: str = "float32"
    threads: int | None = None  # None: as many as this process has CPUs
    pages: int | None = None  # excludes `memory`
    memory: int | None = None  # bytes of the whole server; only on a CPU
    replay_memory: int | None = None  # bytes of the host; None: a row of every position
    training_memory: int = 0  # bytes of passes that the plan of the server counts
    page_size: int = 16
    max_length: int | None = None
    token_budget: int = TOKEN_BUDGET  # rows of the largest step
    process: int = PROCESS_BYTES  # measured size of this process, if it is larger
    device: Device = HOST
    attention_backend: str = backend_names.AUTO
    weight_layout: str = AUTO  # on a CPU; auto: as measured
    enforce_eager: bool = False  # no decode step is captured
    graph_rows: int = 256  # sequences of the largest captured decode step
    memory_fraction: float | None = None  # of an accelerator's memory; None: MEMORY_FRACTION
    host_limit: int | None = None  # bytes of the container beside an accelerator
    tokenizer: Path | None = None  # folder of the tokenizer; None: the model's
    adapters: Mapping[str, Path] = field(default_factory=dict)  # folder by name
    max_lora_rank: int = MAX_LORA_RANK


def load_span(
    folder: Path,
    first: int,
    last: int,
    options: SpanOptions | None = None,
    report: ReportProgress = ignore_progress,
) -> TransformerSpan:
    """Load blocks [first, last) and check them; UserError or DeviceError with one sentence."""
    options = options or SpanOptions()
    shape, facts = plan_shape(folder, first, last, options)
    torch.set_num_threads(options.threads or usable_cpus())
    check_dtype(options.device, getattr(torch, options.dtype))
    if not options.device.is_cpu:
        weights = facts.weight_bytes(first, last, options.dtype)
        check_weights_fit(options.device, shape, weights, options.memory_fraction)
    try:
        return _load_checked(folder, facts, shape, options, report)
    except RuntimeError as error:
        fault = memory_fault(error)
        if fault is None:
            raise
        raise out_of_memory_error(options.device, shape, fault) from error


def _load_checked(
    folder: Path,
    facts: ModelFacts,
    shape: ModelShape,
    options: SpanOptions,
    report: ReportProgress,
) -> TransformerSpan:
    """Load the span, check it, and give it its pages: those of the shape, or on an accelerator as measured."""
    device, threads = options.device, options.threads or usable_cpus()
    dtype: torch.dtype = getattr(torch, options.dtype)
    reading = partial(report, StartPhase.READING)
    part = facts.config.part(shape.first, shape.last)
    loaded = load_modules(folder, part, dtype, device.torch, reading)
    report(StartPhase.CHECKING, 0, 0)
    parts, kv_heads, size = loaded.kv_shape(facts.kv_elements)

    def make_cache(pages: int) -> KvCache:
        blocks = shape.last - shape.first
        sizes = KvCacheShape(blocks, pages, shape.page_size, kv_heads, size, parts)
        return KvCache(sizes, dtype, device.torch)

    pages = shape.total_pages if device.is_cpu else probe_pages(shape, options.token_budget)
    cache = make_cache(pages)
    with current_device(device.torch):
        sessions = pages * shape.page_size // shape.max_length
        served = choose_blocks(loaded, cache, folder, sessions, options.weight_layout)
        wanted = options.attention_backend
        backend = check_served(served, cache, device, folder, wanted, shape.max_length)
        blocks, check, layout = served.blocks, served.check, served.layout
        adapters = _load_adapters(loaded, blocks, check, cache, backend, folder, shape, options)
    rows, output, windows = check.rows, check.output, tuple(call.window for call in check.calls)
    if not device.is_cpu:
        probe = with_pages(shape, pages)
        # Only for the measurement: captured steps have addresses of the cache.
        captured = with_graph_rows(options, options.pages)
        with current_device(device.torch):
            graphs = capture_decode(blocks, rows, output, cache, backend, shape, folder, captured)
        kv = PagedKv(cache, backend)
        span = TransformerSpan(loaded, blocks, probe, kv, SpanHardware(device, threads))
        budget, fraction = options.token_budget, options.memory_fraction
        room = measure_room(span, device, budget, fraction, options.training_memory)
        container = container_memory(facts, shape.first, shape.last, options)
        limit = options.host_limit
        most = None if limit is None else container.most_pages(limit)
        pages = choose_pages(room, device, shape, options.pages, most)
        checked, is_captured = backend.name, graphs is not None
        del span, kv, cache, served, check, backend, graphs  # the pages need their memory
        device.free_caches()
        cache = make_cache(pages)
        backend = choose_backend(checked, cache, device)
    with current_device(device.torch):
        graphs = None
        if device.is_cpu or is_captured:
            captured = with_graph_rows(options, pages)
            graphs = capture_decode(blocks, rows, output, cache, backend, shape, folder, captured)
    shape = replace(with_pages(shape, pages), windows=windows)
    tokenizer = (options.tokenizer or folder) / TOKENIZER_FILE
    grammars = GrammarMatchers(tokenizer, shape.vocab_size) if shape.is_tail else None
    kv, hardware = PagedKv(cache, backend, graphs), SpanHardware(device, threads, layout)
    return TransformerSpan(loaded, blocks, shape, kv, hardware, grammars, adapters)


def _load_adapters(
    loaded: LoadedSpan,
    blocks: Blocks,
    check: SelfCheck,
    cache: KvCache,
    backend: AttentionBackend,
    folder: Path,
    shape: ModelShape,
    options: SpanOptions,
) -> AdapterTable:
    """Read the adapters, and check that the blocks use all of each."""
    if not options.adapters:
        return NO_ADAPTERS
    _, plan = read_config_and_plan(folder)
    facts = read_adapters(folder, shape.first, shape.last, options)
    locate: Locate = locate_module
    if isinstance(blocks, FusedBlocks):
        locate = partial(locate_fused, split_modules(plan, shape.first))
    else:
        hook_modules(getattr(loaded.body, loaded.blocks_name))
    weights = {
        name: load_weights(each, shape.first, locate, cache.dtype, options.device.torch)
        for name, each in facts.items()
    }
    for name, each in weights.items():
        check_adapter(name, each, blocks, check, cache, backend)
    known = [Adapter(name, adapter_revision(each.folder)) for name, each in facts.items()]
    return AdapterTable(known, weights)


def read_adapters(
    folder: Path, first: int, last: int, options: SpanOptions
) -> dict[str, AdapterFacts]:
    """Read the headers of all adapters; UserError for one that this span cannot have."""
    config, plan = read_config_and_plan(folder)
    part = config.part(first, last)
    return {
        name: read_adapter(name, path, plan, part, options.max_lora_rank)
        for name, path in options.adapters.items()
    }


def with_graph_rows(options: SpanOptions, pages: int | None) -> SpanOptions:
    """Return the options without captured steps of more sequences than have a page."""
    rows = options.graph_rows
    return replace(options, graph_rows=rows if pages is None else min(rows, pages))


def capture_decode(
    blocks: Blocks,
    rows: Tensor,
    output: Tensor,
    cache: KvCache,
    backend: AttentionBackend,
    shape: ModelShape,
    folder: Path,
    options: SpanOptions,
) -> DecodeGraphs | None:
    """Return the captured decode steps, which give `output` for `rows`; None if there can or shall be none.

    Only the fused form is captured: transformers' own may branch on values, such as the experts of a row.
    """
    if options.enforce_eager or not isinstance(blocks, FusedBlocks):
        return None
    if not isinstance(backend, CapturableBackend):
        return None
    hidden, most_rows = rows.shape[1], options.graph_rows
    try:
        graphs = DecodeGraphs(blocks, cache, backend, hidden, shape.max_length, most_rows)
        check_decode(graphs, rows, output, cache, folder)
        return graphs
    except ModelSwarmError:
        raise
    except Exception as error:  # of the driver, or memory that the graphs lack
        fault = fault_text(error)
    options.device.check_alive()
    options.device.free_caches()
    log.warning("decode steps on %s are not captured, which is slow: %s", options.device, fault)
    return None


def plan_shape(
    folder: Path, first: int, last: int, options: SpanOptions
) -> tuple[ModelShape, ModelFacts]:
    """Return shape and facts; refuse everything that can be refused before a tensor is read."""
    _check_options(options)
    facts = read_facts(folder, (first, last))
    read_adapters(folder, first, last, options)
    config = facts.config
    check_tokenizer(options.tokenizer or folder, config.vocab)
    length = options.max_length or config.context
    if length > config.context:
        raise UserError(
            "max_length",
            f"{length} is more than the model's context of {config.context} positions",
        )
    shape = ModelShape(
        first=first,
        last=last,
        n_blocks=config.n_blocks,
        row_bytes=facts.row_bytes(options.dtype),
        page_size=options.page_size,
        total_pages=_page_count(facts, first, last, length, options),
        max_length=length,
        vocab_size=config.vocab,
        kv_bytes=facts.kv_bytes(options.dtype),
        block_bytes=facts.read_bytes(first, last, options.dtype),
        logit_bytes=config.vocab * DTYPES[options.dtype],
        hidden_bytes=facts.row_bytes(options.dtype),
    )
    return shape, facts


def _check_options(options: SpanOptions) -> None:
    if options.dtype not in DTYPES:
        raise UserError("dtype", f"{options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.pages is not None and options.memory is not None:
        raise UserError("pages", "give either pages or memory, not both")
    if options.memory is not None and not options.device.is_cpu:
        raise UserError(
            "memory",
            f"sizes a server on the CPU, but it computes on {options.device}; allowed: --memory-fraction",
        )
    if options.memory_fraction is not None and options.device.is_cpu:
        raise UserError(
            "memory_fraction",
            "is of an accelerator, but the server computes on the CPU; allowed: --memory",
        )
    is_captured = options.device.kind == CUDA and options.attention_backend != backend_names.SDPA
    if options.enforce_eager and not is_captured:
        raise UserError(
            "enforce_eager", "has an effect on CUDA with the attention backend triton only"
        )
    check_layout(options.weight_layout, options.device, options.dtype)
    for name in ("threads", "pages", "memory", "page_size", "max_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(name, f"must be at least 1, not {value}")


def container_memory(facts: ModelFacts, first: int, last: int, options: SpanOptions) -> MemoryModel:
    """Return the memory of the server in its container, whose limit it must keep."""
    if not options.device.is_cpu:
        memory = host_memory(
            facts,
            Span(first, last),
            options.dtype,
            options.page_size,
            options.process,
            options.replay_memory,
        )
    else:
        memory = server_memory(
            facts,
            Span(first, last),
            options.dtype,
            options.page_size,
            options.max_length or facts.config.context,
            options.token_budget,
            options.process,
            options.replay_memory,
        )
    count, rank = len(options.adapters), options.max_lora_rank
    adapters = adapter_bytes(facts, Span(first, last), options.dtype, count, rank)
    return replace(memory, training=options.training_memory, adapters=adapters)


def _page_count(facts: ModelFacts, first: int, last: int, length: int, options: SpanOptions) -> int:
    if options.pages is not None:
        return options.pages
    if not options.device.is_cpu:
        return 1  # at least; `_load_checked` measures the room
    memory = container_memory(facts, first, last, options)
    if options.memory is None:
        wanted = _DEFAULT_SESSIONS * -(-length // options.page_size)
        return max(1, min(wanted, _DEFAULT_LIMIT // memory.kv_per_page))
    pages = memory.most_pages(options.memory)
    if pages < 1:
        needs = memory.with_pages(1)
        raise UserError(
            "memory",
            f"{human_bytes(options.memory)} leave no room for KV: a server of blocks {first}:{last} needs "
            f"{human_bytes(needs.total)} ({needs}); allowed: at least {limit_at_least(needs.total)}",
        )
    return pages
