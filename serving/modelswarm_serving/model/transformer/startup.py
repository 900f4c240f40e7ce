"""Turns a model folder and options into a ready `TransformerSpan`, or into one clear sentence.

Called by `app.py`. Sizes the KV cache, loads the blocks and runs the self-check. Knows no sockets or sessions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from modelswarm.checkpoint.facts import DTYPES, ModelFacts, read_facts
from modelswarm.checkpoint.tokenizer import check_tokenizer
from modelswarm.errors import UserError
from modelswarm.placement.memory import (
    PROCESS_BYTES,
    TOKEN_BUDGET,
    MemoryModel,
    device_memory,
    server_memory,
)
from modelswarm.placement.quantity import human_bytes, limit_at_least
from modelswarm.placement.spans import Span
from modelswarm.process.cpu_limit import usable_cpus
from modelswarm.process.start_progress import ReportProgress, StartPhase, ignore_progress
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.base import Compute, ModelShape
from modelswarm_serving.model.transformer.fusion import FusedBlocks
from modelswarm_serving.model.transformer.loading import load_modules
from modelswarm_serving.model.transformer.self_check import check_fused, run_reference
from modelswarm_serving.model.transformer.span import TransformerSpan

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
    memory: int | None = None  # bytes of the whole server; of an accelerator: of its own memory
    replay_memory: int | None = None  # bytes of the host; None: a row of every position
    page_size: int = 16
    max_length: int | None = None
    token_budget: int = TOKEN_BUDGET  # rows of the largest step
    process: int = PROCESS_BYTES  # measured size of this process, if it is larger
    device: str = "cpu"
    tokenizer: Path | None = None  # folder of the tokenizer; None: the model's


def load_span(
    folder: Path,
    first: int,
    last: int,
    options: SpanOptions | None = None,
    report: ReportProgress = ignore_progress,
) -> TransformerSpan:
    """Load blocks [first, last) and check them; raise UserError with one sentence."""
    options = options or SpanOptions()
    shape, facts = plan_shape(folder, first, last, options)
    compute = Compute(options.threads or usable_cpus())
    torch.set_num_threads(compute.threads)
    dtype: torch.dtype = getattr(torch, options.dtype)
    device = torch.device(options.device)
    reading = partial(report, StartPhase.READING)
    loaded = load_modules(folder, facts.config.part(first, last), dtype, device, reading)
    report(StartPhase.CHECKING, 0, 0)
    kv_heads = facts.kv_elements // 2 // loaded.head_dim
    cache_shape = KvCacheShape(
        last - first, shape.total_pages, shape.page_size, kv_heads, loaded.head_dim
    )
    cache = KvCache(cache_shape, dtype, device)
    check = run_reference(loaded, cache, folder)
    blocks = FusedBlocks(loaded.body, dtype)
    check_fused(blocks, check, cache, folder)
    return TransformerSpan(loaded, blocks, cache, shape, compute)


def plan_shape(
    folder: Path, first: int, last: int, options: SpanOptions
) -> tuple[ModelShape, ModelFacts]:
    """Return shape and facts; refuse everything that can be refused before a tensor is read."""
    _check_options(options)
    facts = read_facts(folder, (first, last))
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
    )
    return shape, facts


def _check_options(options: SpanOptions) -> None:
    if options.dtype not in DTYPES:
        raise UserError("dtype", f"{options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.pages is not None and options.memory is not None:
        raise UserError("pages", "give either pages or memory, not both")
    for name in ("threads", "pages", "memory", "page_size", "max_length"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UserError(name, f"must be at least 1, not {value}")


def memory_model(facts: ModelFacts, first: int, last: int, options: SpanOptions) -> MemoryModel:
    """Return the memory of the server, or on an accelerator that of the device."""
    span, length = Span(first, last), options.max_length or facts.config.context
    if torch.device(options.device).type != "cpu":
        return device_memory(
            facts, span, options.dtype, options.page_size, length, options.token_budget
        )
    return server_memory(
        facts,
        span,
        options.dtype,
        options.page_size,
        length,
        options.token_budget,
        options.process,
        options.replay_memory,
    )


def _page_count(facts: ModelFacts, first: int, last: int, length: int, options: SpanOptions) -> int:
    if options.pages is not None:
        return options.pages
    memory = memory_model(facts, first, last, options)
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
