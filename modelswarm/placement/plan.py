"""Plans a swarm before anything starts: spans, memory and KV room of each server.

`modelswarm plan` prints the plan, and `modelswarm up` starts servers with exactly these pages. Knows documents and
facts; starts nothing, reads no files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from modelswarm.checkpoint.facts import ModelFacts
from modelswarm.errors import UserError
from modelswarm.placement.budgets import (
    Budget,
    ServerSizes,
    container_budget,
    machine_budgets,
    pool_budgets,
    training_bytes,
)
from modelswarm.placement.dtype import (
    ACCELERATORS,
    UNKNOWN_CPUS,
    Hardware,
    choose_dtype,
    gpus_of_capability,
)
from modelswarm.placement.memory import TOKEN_BUDGET, ServerMemory
from modelswarm.placement.quantity import human_bytes
from modelswarm.placement.spans import (
    Span,
    automatic_spans,
    even_spans,
    given_spans,
    smallest_spans,
)
from modelswarm.resources.accelerators import check_pool_template, has_accelerator
from modelswarm.resources.spec import (
    MAX_LORA_RANK,
    Adapter,
    ModelSwarm,
    Spec,
    parse_duration,
    servers_fault,
)

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
    kv_bytes_per_token: int
    pages: int
    memory: (
        ServerMemory  # of its container, or where all pools have accelerators of the accelerator
    )
    host: ServerMemory | None = None  # of its container where the server computes on an accelerator

    @property
    def free_tokens(self) -> int:
        """Positions that sessions can have at once on an idle server."""
        return admissible_pages(self.pages) * PAGE_SIZE


@dataclass(frozen=True, slots=True)
class SwarmPlan:
    name: str
    served_name: str
    source: str
    n_blocks: int
    dtype: str
    dtype_reason: str
    hardware: str  # on which servers compute, as far as the plan knows it
    max_length: int
    replicas: int
    hold_seconds: float  # a session without a route is held for this time
    servers: tuple[ServerPlan, ...]  # one per span, in order
    has_given_pages: bool  # by spec.sessions.concurrent; else a server fills its accelerator
    tokenizer: str | None = None  # address; None: the model's own
    chat_template: str | None = None  # the text; None: the model's own
    adapters: tuple[Adapter, ...] = ()
    max_lora_rank: int = MAX_LORA_RANK
    training_memory: int | None = None  # bytes of passes; None: what the limit leaves
    warnings: tuple[str, ...] = ()  # sentences about what will not work

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(server.span for server in self.servers)

    @property
    def total_bytes(self) -> int:
        servers = self.servers
        hosts = sum(server.host.total for server in servers if server.host is not None)
        return self.replicas * (sum(server.memory.total for server in servers) + hosts)

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
    hardware: Hardware | None = None,
    node_memory: Mapping[str, int] | None = None,
) -> SwarmPlan:
    """Return the plan for a document.

    `source`: the model's address with its revision. `memory`: bytes of one server, instead of the limits of pools.
    `token_budget`: rows of a server's largest step. `hardware`: of all servers; None: as far as the pools tell.
    `node_memory`: bytes of the accelerators by pool, as far as nodes tell it.
    """
    spec = swarm.spec
    _check_supported(spec)
    _check_adapters(swarm)
    hardware = hardware or pool_hardware(spec)
    chosen = choose_dtype(spec.model.dtype, facts.dtype, hardware)
    dtype = chosen.name
    max_length = _max_length(spec, facts)
    count, rank = len(spec.model.adapters), spec.model.max_lora_rank
    training = training_bytes(spec)
    sizes = ServerSizes(
        facts, dtype, PAGE_SIZE, max_length, token_budget, count, rank, training or 0
    )
    if memory is not None:
        budgets: tuple[Budget, ...] = (container_budget(memory, "--memory", sizes),)
    elif hardware is ACCELERATORS and not any(map(has_accelerator, spec.pools)):
        budgets = machine_budgets(spec, sizes)
    else:
        budgets = pool_budgets(spec, sizes, node_memory or {})
    spans = _plan_spans(spec, facts.config.n_blocks, max_length, budgets)
    if fault := servers_fault(len(spans), spec.replicas):
        raise UserError("spec.replicas", fault)
    per_block = facts.kv_bytes(dtype)
    servers = tuple(
        _plan_server(spec, max_length, span, spans, per_block, budgets) for span in spans
    )
    return SwarmPlan(
        name=swarm.metadata.name,
        served_name=swarm.served_name,
        source=source,
        n_blocks=facts.config.n_blocks,
        dtype=dtype,
        dtype_reason=chosen.reason,
        hardware=hardware.name,
        max_length=max_length,
        replicas=spec.replicas,
        hold_seconds=parse_duration(spec.sessions.hold_limit),
        servers=servers,
        has_given_pages=spec.sessions.concurrent is not None,
        tokenizer=spec.model.tokenizer,
        chat_template=spec.model.chat_template,
        adapters=spec.model.adapters,
        max_lora_rank=spec.model.max_lora_rank,
        training_memory=training,
    )


def _check_supported(spec: Spec) -> None:
    """Refuse values that documents allow and servers do not support."""
    if spec.model.quantization != "none":
        raise UserError(
            "spec.model.quantization",
            f"{spec.model.quantization!r} is not served yet; allowed: 'none'",
        )
    for index, pool in enumerate(spec.pools):
        check_pool_template(pool, f"spec.pools[{index}].podTemplate")


def _check_adapters(swarm: ModelSwarm) -> None:
    if any(adapter.name == swarm.served_name for adapter in swarm.spec.model.adapters):
        detail = f"{swarm.served_name!r} is the model's own name; allowed: another one"
        raise UserError("spec.model.adapters", detail)


def pool_hardware(spec: Spec, capability: int | None = None) -> Hardware:
    """Return the hardware of all servers as the pools tell it.

    `capability`: lowest major CUDA capability of the pools' nodes; None: not known.
    """
    on_accelerators = bool(spec.pools) and all(map(has_accelerator, spec.pools))
    return gpus_of_capability(capability) if on_accelerators else UNKNOWN_CPUS


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
    budgets: Sequence[Budget],
) -> tuple[Span, ...]:
    if spec.spans.ranges is not None:
        ranges = [(part.first, part.last) for part in spec.spans.ranges]
        return given_spans(n_blocks, ranges)
    if spec.spans.count is not None:
        return even_spans(n_blocks, spec.spans.count)
    pages = pages_for_sessions(spec.sessions.concurrent or 1, max_length)
    found = [
        automatic_spans(n_blocks, budget.needed(pages), budget.memory, budget.field)
        for budget in budgets
    ]
    return max(found, key=len)  # the fewest that keep every budget


def _plan_server(
    spec: Spec,
    max_length: int,
    span: Span,
    spans: Sequence[Span],
    per_block: int,
    budgets: Sequence[Budget],
) -> ServerPlan:
    """`spans`: all of the plan; `per_block`: KV bytes of one position in one block."""
    memories = [budget.memory_of(span) for budget in budgets]
    rooms = [budget.most_pages(span) for budget in budgets]
    room = min((each for each in rooms if each is not None), default=None)
    pages = _page_count(spec, max_length, memories[0].kv_per_page, room)
    for budget, each in zip(budgets, rooms, strict=True):
        if each is not None and (each < MIN_PAGES or pages > each):
            wanted = max(pages, MIN_PAGES)
            raise _does_not_fit(spec, max_length, span, spans, budget, budgets, wanted)
    host = memories[-1].with_pages(pages) if len(budgets) > 1 else None
    return ServerPlan(span, span.blocks * per_block, pages, memories[0].with_pages(pages), host)


def _does_not_fit(
    spec: Spec,
    max_length: int,
    span: Span,
    spans: Sequence[Span],
    budget: Budget,
    budgets: Sequence[Budget],
    pages: int,
) -> UserError:
    """Return the error of a server with `pages` pages, with numbers that work for the servers of all spans."""

    def at_least(pages: int) -> str:
        return budget.at_least(max(budget.memory_of(each).needed(pages) for each in spans))

    needs, concurrent = budget.memory_of(span).with_pages(pages), spec.sessions.concurrent
    rooms = [each.most_pages(part) for each in budgets for part in spans]
    fitting = full_sessions(min(room for room in rooms if room is not None), max_length)
    if concurrent is not None and fitting > 0:
        return UserError(
            "spec.sessions.concurrent",
            f"{concurrent} sessions of {max_length} positions do not fit on a server of blocks {span} in {budget}: it "
            f"needs {human_bytes(needs.total)} ({needs}); allowed: at most {fitting}, or a limit of "
            f"{at_least(pages)} or more",
        )
    cures = [f"at least {at_least(pages)}"]
    smallest = smallest_spans(spans[-1].last)
    known = [each for each in budgets if each.memory is not None]
    if all(max(map(each.needed(pages), smallest)) <= (each.memory or 0) for each in known):
        cures.append("more spans")
    if concurrent is not None:
        cures.append("a smaller spec.sessions.maxLength")
    elif (full := pages_for_sessions(1, max_length)) > pages:
        cures[0] += f" ({at_least(full)} for a session of {max_length} positions)"
    return UserError(
        budget.field,
        f"a server of blocks {span} needs {human_bytes(needs.total)} ({needs}), but has {budget}; "
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
