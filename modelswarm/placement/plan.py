"""What a swarm will need, before anything starts: spans, memory and KV room of each server.

`modelswarm plan` prints it and `modelswarm up` starts servers with exactly these pages. Knows documents and facts;
starts nothing, reads no files.
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

PAGE_SIZE = 16  # positions
REPAIR_FRACTION = 0.1  # of the pages; new sessions never get these (R12)
DEFAULT_SESSIONS = 8  # KV room when neither sessions nor memory say how much ...
DEFAULT_KV_BYTES = 512 << 20  # ... but no more than this per server


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
        """Rows that are kept for a lost neighbour: one for every position that there is KV for."""
        return replay_bytes(self.row_bytes, self.pages * PAGE_SIZE)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.replay_bytes

    @property
    def free_tokens(self) -> int:
        """Positions that sessions can have at the same time on one idle server."""
        return _admissible(self.pages) * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    name: str
    served_name: str
    source: str
    n_blocks: int
    dtype: str
    max_length: int
    replicas: int
    hold_seconds: float  # a session without a route is held so long
    servers: tuple[ServerPlan, ...]  # one per span, in order
    tokenizer: str | None = None  # address of another than the model's own
    chat_template: str | None = None  # the template itself, instead of the model's own

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(server.span for server in self.servers)

    @property
    def total_bytes(self) -> int:
        return self.replicas * sum(server.total_bytes for server in self.servers)

    @property
    def full_sessions(self) -> int:
        """Sessions of full length that one route can hold at the same time."""
        per_session = _pages_for(self.max_length)
        return min(_admissible(server.pages) // per_session for server in self.servers)


def plan_swarm(
    swarm: ModelSwarm, facts: ModelFacts, source: str, memory: int | None = None
) -> SwarmPlan:
    """The plan for a document.

    `source`: the model's address, revision included. `memory`: bytes one server may use, instead of what pools say.
    """
    spec = swarm.spec
    _check_served(spec)
    available = memory if memory is not None else pool_memory(spec)
    dtype = running_dtype(spec)
    max_length = _max_length(spec, facts)
    spans = _spans(spec, facts, dtype, max_length, available)
    servers = tuple(_server(spec, facts, dtype, max_length, span, available) for span in spans)
    return SwarmPlan(
        name=swarm.metadata.name,
        served_name=swarm.served_name,
        source=source,
        n_blocks=facts.outline.n_blocks,
        dtype=dtype,
        max_length=max_length,
        replicas=spec.replicas,
        hold_seconds=parse_duration(spec.sessions.hold_limit),
        servers=servers,
        tokenizer=spec.model.tokenizer,
        chat_template=spec.model.chat_template,
    )


def _check_served(spec: Spec) -> None:
    """What documents may say already, and servers cannot do yet."""
    if spec.model.quantization != "none":
        raise UserError(
            "spec.model.quantization",
            f"{spec.model.quantization!r} is not served yet; allowed: 'none'",
        )


def running_dtype(spec: Spec) -> str:
    """What `auto` means on a machine without accelerators."""
    return "float32" if spec.model.dtype == "auto" else spec.model.dtype


def pool_memory(spec: Spec) -> int | None:
    """The smallest memory limit of the pools: what every server can count on. None: no pool says."""
    limits = [
        bytes_of(pool.resources.limits["memory"], f"spec.pools[{index}].resources.limits.memory")
        for index, pool in enumerate(spec.pools)
        if "memory" in pool.resources.limits
    ]
    return min(limits, default=None)


def _max_length(spec: Spec, facts: ModelFacts) -> int:
    wanted = spec.sessions.max_length
    if wanted is not None and wanted > facts.outline.context:
        raise UserError(
            "spec.sessions.maxLength",
            f"{wanted} is more than the model's context; allowed: 1 to {facts.outline.context}",
        )
    return wanted or facts.outline.context


def _spans(
    spec: Spec, facts: ModelFacts, dtype: str, max_length: int, available: int | None
) -> tuple[Span, ...]:
    if spec.spans.ranges is not None:
        ranges = [(part.first, part.last) for part in spec.spans.ranges]
        return given_spans(facts.outline.n_blocks, ranges)
    if spec.spans.count is not None:
        return even_spans(facts.outline.n_blocks, spec.spans.count)
    pages = _wanted_pages(spec.sessions.concurrent or 1, max_length)

    def needed(span: Span) -> int:
        positions = pages * PAGE_SIZE
        kv = span.blocks * facts.kv_bytes(dtype) * positions
        kept = replay_bytes(facts.row_bytes(dtype), positions)
        return facts.weight_bytes(span.first, span.last, dtype) + kv + kept

    return automatic_spans(facts.outline.n_blocks, needed, available)


def _server(
    spec: Spec, facts: ModelFacts, dtype: str, max_length: int, span: Span, available: int | None
) -> ServerPlan:
    weights = facts.weight_bytes(span.first, span.last, dtype)
    per_token, row = span.blocks * facts.kv_bytes(dtype), facts.row_bytes(dtype)
    page = per_token * PAGE_SIZE + replay_bytes(row, PAGE_SIZE)
    room = None if available is None else (available - weights) // page
    if room is not None and room < _wanted_pages(1, 1):
        raise UserError(
            "memory",
            f"a server of blocks {span} needs {human_bytes(weights)} for weights and more for KV and kept rows, "
            f"but has {human_bytes(available or 0)}; allowed: more memory, or more spans",
        )
    pages = _pages(spec, max_length, per_token, room)
    if room is not None and pages > room:
        fitting = _admissible(room) // _pages_for(max_length)
        raise UserError(
            "spec.sessions.concurrent",
            f"{spec.sessions.concurrent} sessions of {max_length} positions do not fit beside the weights "
            f"of blocks {span} in {human_bytes(available or 0)}; allowed: at most {fitting}",
        )
    return ServerPlan(span, weights, per_token, row, pages)


def _pages(spec: Spec, max_length: int, per_token: int, room: int | None) -> int:
    if spec.sessions.concurrent is not None:
        return _wanted_pages(spec.sessions.concurrent, max_length)
    if room is not None:
        return room
    most = max(DEFAULT_KV_BYTES // (per_token * PAGE_SIZE), _wanted_pages(1, 1))
    return min(_wanted_pages(DEFAULT_SESSIONS, max_length), most)


def _pages_for(length: int) -> int:
    return math.ceil(length / PAGE_SIZE)


def _wanted_pages(sessions: int, length: int) -> int:
    """Pages with room for these sessions beside the pages kept for repairs."""
    pages = math.ceil(sessions * _pages_for(length) / (1 - REPAIR_FRACTION))
    while _admissible(pages) < sessions * _pages_for(length):
        pages += 1
    return pages


def _admissible(pages: int) -> int:
    """Pages that new sessions may take."""
    return pages - math.ceil(pages * REPAIR_FRACTION)
