"""Plans a swarm before anything starts: spans, memory and KV room of each server.

`modelswarm plan` prints the plan, and `modelswarm up` starts servers with exactly these pages. Knows documents and
facts; starts nothing, reads no files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from modelswarm.checkpoint.facts import ModelFacts
from modelswarm.errors import UserError
from modelswarm.placement.quantity import bytes_of, human_bytes
from modelswarm.placement.replay_memory import replay_bytes
from modelswarm.placement.spans import Span, automatic_spans, even_spans, given_spans
from modelswarm.resources.spec import ModelSwarm, Spec, parse_duration

PAGE_SIZE = 16
"""Positions per page."""
RECOVERY_FRACTION = 0.1
"""Share of the pages that new sessions never get (R12, admission)."""
DEFAULT_SESSIONS = 8
"""KV room in sessions of full length, if the document has neither sessions nor memory ..."""
DEFAULT_KV_BYTES = 512 << 20
"""... but at most this many bytes per server."""


@dataclass(frozen=True, slots=True)
class ServerPlan:
    """One server of a span; all servers of a span are alike."""

    span: Span
    weight_bytes: int
    kv_bytes_per_token: int
    row_bytes: int
    pages: int

    @property
    def kv_bytes(self) -> int:
        return self.pages * PAGE_SIZE * self.kv_bytes_per_token

    @property
    def replay_bytes(self) -> int:
        """Memory of the replay log: one row for every position of KV."""
        return replay_bytes(self.row_bytes, self.pages * PAGE_SIZE)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.replay_bytes

    @property
    def free_tokens(self) -> int:
        """Positions that sessions can have at once on an idle server."""
        return _admissible_pages(self.pages) * PAGE_SIZE


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
        return self.replicas * sum(server.total_bytes for server in self.servers)

    @property
    def full_sessions(self) -> int:
        """Sessions of full length that one route can hold at once."""
        per_session = _pages_for(self.max_length)
        return min(_admissible_pages(server.pages) // per_session for server in self.servers)


def plan_swarm(
    swarm: ModelSwarm, facts: ModelFacts, source: str, memory: int | None = None
) -> SwarmPlan:
    """Return the plan for a document.

    `source`: the model's address with its revision. `memory`: bytes of one server, instead of the limits of pools.
    """
    spec = swarm.spec
    _check_supported(spec)
    available = memory if memory is not None else pool_memory(spec)
    dtype = running_dtype(spec)
    max_length = _max_length(spec, facts)
    spans = _plan_spans(spec, facts, dtype, max_length, available)
    servers = tuple(_plan_server(spec, facts, dtype, max_length, span, available) for span in spans)
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
    spec: Spec, facts: ModelFacts, dtype: str, max_length: int, available: int | None
) -> tuple[Span, ...]:
    if spec.spans.ranges is not None:
        ranges = [(part.first, part.last) for part in spec.spans.ranges]
        return given_spans(facts.config.n_blocks, ranges)
    if spec.spans.count is not None:
        return even_spans(facts.config.n_blocks, spec.spans.count)
    pages = _pages_for_sessions(spec.sessions.concurrent or 1, max_length)

    def needed(span: Span) -> int:
        positions = pages * PAGE_SIZE
        kv = span.blocks * facts.kv_bytes(dtype) * positions
        kept = replay_bytes(facts.row_bytes(dtype), positions)
        return facts.weight_bytes(span.first, span.last, dtype) + kv + kept

    return automatic_spans(facts.config.n_blocks, needed, available)


def _plan_server(
    spec: Spec, facts: ModelFacts, dtype: str, max_length: int, span: Span, available: int | None
) -> ServerPlan:
    weights = facts.weight_bytes(span.first, span.last, dtype)
    per_token, row = span.blocks * facts.kv_bytes(dtype), facts.row_bytes(dtype)
    page = per_token * PAGE_SIZE + replay_bytes(row, PAGE_SIZE)
    room = None if available is None else (available - weights) // page
    if room is not None and room < _pages_for_sessions(1, 1):
        raise UserError(
            "memory",
            f"a server of blocks {span} needs {human_bytes(weights)} for weights and more for KV and the replay log, "
            f"but has {human_bytes(available or 0)}; allowed: more memory, or more spans",
        )
    pages = _page_count(spec, max_length, per_token, room)
    if room is not None and pages > room:
        fitting = _admissible_pages(room) // _pages_for(max_length)
        raise UserError(
            "spec.sessions.concurrent",
            f"{spec.sessions.concurrent} sessions of {max_length} positions do not fit beside the weights "
            f"of blocks {span} in {human_bytes(available or 0)}; allowed: at most {fitting}",
        )
    return ServerPlan(span, weights, per_token, row, pages)


def _page_count(spec: Spec, max_length: int, per_token: int, room: int | None) -> int:
    if spec.sessions.concurrent is not None:
        return _pages_for_sessions(spec.sessions.concurrent, max_length)
    if room is not None:
        return room
    max_pages = max(DEFAULT_KV_BYTES // (per_token * PAGE_SIZE), _pages_for_sessions(1, 1))
    return min(_pages_for_sessions(DEFAULT_SESSIONS, max_length), max_pages)


def _pages_for(length: int) -> int:
    return math.ceil(length / PAGE_SIZE)


def _pages_for_sessions(sessions: int, length: int) -> int:
    """Return the pages for these sessions and the share reserved for recoveries."""
    pages = math.ceil(sessions * _pages_for(length) / (1 - RECOVERY_FRACTION))
    while _admissible_pages(pages) < sessions * _pages_for(length):
        pages += 1
    return pages


def _admissible_pages(pages: int) -> int:
    """Return the pages that new sessions may take."""
    return pages - math.ceil(pages * RECOVERY_FRACTION)
