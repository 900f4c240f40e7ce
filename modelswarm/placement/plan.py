"""Plans a swarm before anything starts: spans, memory and KV room of each server.

`modelswarm plan` prints the plan, and `modelswarm up` starts servers with exactly these pages. Knows documents and
facts; starts nothing, reads no files.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from modelswarm.checkpoint.facts import ModelFacts
from modelswarm.errors import UserError
from modelswarm.placement.memory import TOKEN_BUDGET, MemoryModel, ServerMemory, server_memory
from modelswarm.placement.quantity import bytes_of, human_bytes, limit_at_least
from modelswarm.placement.spans import Span, automatic_spans, even_spans, given_spans
from modelswarm.resources.spec import ModelSwarm, Spec, parse_duration, servers_fault

PAGE_SIZE = 16
"""Positions per page."""
RECOVERY_FRACTION = 0.1
"""Share of the pages that new sessions never get (R12, admission)."""
DEFAULT_SESSIONS = 8
"""KV room in sessions of full length, if the document has neither sessions nor memory ..."""
DEFAULT_KV_BYTES = 512 << 20
"""... but at most this many bytes per server."""
KERNEL_PAGE = 64 << 10
"""Bytes of the largest page of memory that Linux uses: the limit of a control group is rounded down to whole pages."""
_LIMITS = "spec.pools[].resources.limits.memory"


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server of a span; all servers of a span are alike."""

    span: Span
    kv_bytes_per_token: int
    pages: int
    memory: ServerMemory

    @property
    def free_tokens(self) -> int:
        """Positions that sessions can have at once on an idle server."""
        return admissible_pages(self.pages) * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class _Limit:
    """The memory of one server, and the name of the field that sets it."""

    size: int | None  # bytes; None: no limit
    field: str

    @classmethod
    def of(cls, size: int | None, field: str) -> _Limit:
        return cls(None if size is None else size // KERNEL_PAGE * KERNEL_PAGE, field)


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    name: str
    served_name: str
    source: str
    n_blocks: int
    dtype: str
    max_length: int
    replicas: int
    hold_seconds: float  # a session without a route is held for this time
    servers: tuple[ServerPlan, ...]  # one per span, in order
    tokenizer: str | None = None  # address; None: the model's own
    chat_template: str | None = None  # the text; None: the model's own
    warnings: tuple[str, ...] = ()  # sentences about what will not work

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(server.span for server in self.servers)

    @property
    def total_bytes(self) -> int:
        return self.replicas * sum(server.memory.total for server in self.servers)

    @property
    def full_sessions(self) -> int:
        """Sessions of full length that one route can hold at once."""
        return min(full_sessions(server.pages, self.max_length) for server in self.servers)


def plan_swarm(
    swarm: ModelSwarm,
    facts: ModelFacts,
    source: str,
    memory: int | None = None,
    token_budget: int = TOKEN_BUDGET,
) -> SwarmPlan:
    """Return the plan for a document.

    `source`: the model's address with its revision. `memory`: bytes of one server, instead of the limits of pools.
    `token_budget`: rows of a server's largest step.
    """
    spec = swarm.spec
    _check_supported(spec)
    if memory is None:
        _check_accelerators(spec)
    limit = (
        _Limit.of(memory, "--memory")
        if memory is not None
        else _Limit.of(pool_memory(spec), _LIMITS)
    )
    dtype = running_dtype(spec)
    max_length = _max_length(spec, facts)

    def memory_of(span: Span) -> MemoryModel:
        return server_memory(facts, span, dtype, PAGE_SIZE, max_length, token_budget)

    spans = _plan_spans(spec, facts.config.n_blocks, max_length, limit, memory_of)
    if fault := servers_fault(len(spans), spec.replicas):
        raise UserError("spec.replicas", fault)
    per_block = facts.kv_bytes(dtype)
    servers = tuple(
        _plan_server(spec, max_length, span, per_block, limit, memory_of(span)) for span in spans
    )
    return SwarmPlan(
        name=swarm.metadata.name,
        served_name=swarm.served_name,
        source=source,
        n_blocks=facts.config.n_blocks,
        dtype=dtype,
        max_length=max_length,
        replicas=spec.replicas,
        hold_seconds=parse_duration(spec.sessions.hold_limit),
        servers=servers,
        tokenizer=spec.model.tokenizer,
        chat_template=spec.model.chat_template,
    )


def _check_supported(spec: Spec) -> None:
    """Refuse values that documents allow and servers do not support yet."""
    if spec.model.quantization != "none":
        raise UserError(
            "spec.model.quantization",
            f"{spec.model.quantization!r} is not served yet; allowed: 'none'",
        )


def _check_accelerators(spec: Spec) -> None:
    """Refuse to size KV and spans of accelerators by `limits.memory`, which is memory of the host."""
    for index, pool in enumerate(spec.pools):
        limits = pool.resources.limits
        device = next((name for name in limits if "/" in name), None)
        if device is None or "memory" not in limits:
            continue
        reason = (
            f"is needed, because spec.pools[{index}] ({pool.name}) has {device}: its limits.memory is memory of the "
            "host and says nothing of the device's"
        )
        if spec.sessions.concurrent is None:
            raise UserError("spec.sessions.concurrent", f"{reason}; allowed: 1 to 1000000")
        if spec.spans.count is None and spec.spans.ranges is None:
            raise UserError("spec.spans", f"{reason}; allowed: count or ranges")


def running_dtype(spec: Spec) -> str:
    """Return the dtype of servers; `auto` is float32 on a machine without accelerators."""
    return "float32" if spec.model.dtype == "auto" else spec.model.dtype


def pool_memory(spec: Spec) -> int | None:
    """Return the smallest memory limit of the pools, which every server has; None if no pool has one."""
    limits = [
        bytes_of(pool.resources.limits["memory"], f"spec.pools[{index}].resources.limits.memory")
        for index, pool in enumerate(spec.pools)
        if "memory" in pool.resources.limits
    ]
    return min(limits, default=None)


def _max_length(spec: Spec, facts: ModelFacts) -> int:
    wanted = spec.sessions.max_length
    if wanted is not None and wanted > facts.config.context:
        raise UserError(
            "spec.sessions.maxLength",
            f"{wanted} is more than the model's context; allowed: 1 to {facts.config.context}",
        )
    return wanted or facts.config.context


def _plan_spans(
    spec: Spec,
    n_blocks: int,
    max_length: int,
    limit: _Limit,
    memory_of: Callable[[Span], MemoryModel],
) -> tuple[Span, ...]:
    if spec.spans.ranges is not None:
        ranges = [(part.first, part.last) for part in spec.spans.ranges]
        return given_spans(n_blocks, ranges)
    if spec.spans.count is not None:
        return even_spans(n_blocks, spec.spans.count)
    pages = pages_for_sessions(spec.sessions.concurrent or 1, max_length)
    return automatic_spans(n_blocks, lambda span: memory_of(span).needed(pages), limit.size)


def _plan_server(
    spec: Spec, max_length: int, span: Span, per_block: int, limit: _Limit, memory: MemoryModel
) -> ServerPlan:
    """`per_block`: KV bytes of one position in one block."""
    room = None if limit.size is None else memory.most_pages(limit.size)
    pages = _page_count(spec, max_length, memory.kv_per_page, room)
    if room is not None and (room < MIN_PAGES or pages > room):
        raise _does_not_fit(spec, max_length, span, limit, memory, max(pages, MIN_PAGES), room)
    return ServerPlan(span, span.blocks * per_block, pages, memory.with_pages(pages))


def _does_not_fit(
    spec: Spec,
    max_length: int,
    span: Span,
    limit: _Limit,
    memory: MemoryModel,
    pages: int,
    room: int,
) -> UserError:
    """Return the error of a server with `pages` pages where `room` fit, with the smallest limit that works."""
    needs, concurrent = memory.with_pages(pages), spec.sessions.concurrent
    has = human_bytes(limit.size or 0)
    least = limit_at_least(needs.total)
    fitting = full_sessions(room, max_length)
    if concurrent is not None and fitting > 0:
        return UserError(
            "spec.sessions.concurrent",
            f"{concurrent} sessions of {max_length} positions do not fit on a server of blocks {span} in {has}: it "
            f"needs {human_bytes(needs.total)} ({needs}); allowed: at most {fitting}, or a limit of {least} or more",
        )
    cures = [f"at least {least}"]
    if (limit.size or 0) > memory.needed(0) - memory.weights - memory.activations:
        cures.append("more spans")
    if concurrent is not None:
        cures.append("a smaller spec.sessions.maxLength")
    elif (full := pages_for_sessions(1, max_length)) > pages:
        cures[0] += (
            f" ({limit_at_least(memory.needed(full))} for a session of {max_length} positions)"
        )
    return UserError(
        limit.field,
        f"a server of blocks {span} needs {human_bytes(needs.total)} ({needs}), but has {has}; "
        f"allowed: {', or '.join(cures)}",
    )


def _page_count(spec: Spec, max_length: int, page_bytes: int, room: int | None) -> int:
    if spec.sessions.concurrent is not None:
        return pages_for_sessions(spec.sessions.concurrent, max_length)
    if room is not None:
        return room
    max_pages = max(DEFAULT_KV_BYTES // page_bytes, MIN_PAGES)
    return min(pages_for_sessions(DEFAULT_SESSIONS, max_length), max_pages)


def full_sessions(pages: int, max_length: int, page_size: int = PAGE_SIZE) -> int:
    """Return the sessions of full length that a server with these pages has room for."""
    return admissible_pages(pages) // math.ceil(max_length / page_size)


def pages_for_sessions(sessions: int, length: int, page_size: int = PAGE_SIZE) -> int:
    """Return the pages for these sessions and the share reserved for recoveries."""
    wanted = sessions * math.ceil(length / page_size)
    pages = math.ceil(wanted / (1 - RECOVERY_FRACTION))
    while admissible_pages(pages) < wanted:
        pages += 1
    return pages


def admissible_pages(pages: int) -> int:
    """Return the pages that new sessions may take."""
    return pages - math.ceil(pages * RECOVERY_FRACTION)


MIN_PAGES = pages_for_sessions(1, 1)
"""Fewest pages of a server: one for a session, and the share reserved for recoveries."""
