"""Memory budgets of one server, from the pools: of its container, and of its accelerator.

A server on a CPU has everything in the memory of its container. A server on an accelerator has weights, activations, KV
and its context there. In its container are the process, the retained rows, and the weights while they are loaded. Used
by `plan.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from modelswarm.checkpoint.facts import ModelFacts
from modelswarm.errors import UserError
from modelswarm.placement.memory import (
    MEMORY_FRACTION,
    MemoryModel,
    adapter_bytes,
    device_memory,
    host_memory,
    server_memory,
)
from modelswarm.placement.quantity import bytes_of, human_bytes, limit_at_least
from modelswarm.placement.spans import Span
from modelswarm.resources.accelerators import (
    accelerators_of,
    describe_device,
    has_accelerator,
    memory_label,
)
from modelswarm.resources.rules import parse_quantity
from modelswarm.resources.spec import Pool, Spec

KERNEL_PAGE = 64 << 10
"""Bytes of the largest page of memory that Linux uses: the limit of a control group is rounded down to whole pages."""
LIMITS = "spec.pools[].resources.limits.memory"
DEVICE = "spec.pools[].accelerator.memory"


@dataclass(frozen=True, slots=True)
class ServerSizes:
    """The numbers that decide about the memory of a server of a span."""

    facts: ModelFacts
    dtype: str
    page_size: int
    max_length: int
    token_budget: int
    adapters: int = 0  # number of them
    lora_rank: int = 0  # of each
    training: int = 0  # bytes of forward and backward passes

    def in_container(self, span: Span) -> MemoryModel:
        """Return the memory of a server that computes on the CPU."""
        memory = server_memory(
            self.facts, span, self.dtype, self.page_size, self.max_length, self.token_budget
        )
        return self._with_options(memory, span)

    def on_device(self, span: Span) -> MemoryModel:
        memory = device_memory(
            self.facts, span, self.dtype, self.page_size, self.max_length, self.token_budget
        )
        return self._with_options(memory, span)

    def beside_device(self, span: Span) -> MemoryModel:
        """Return the memory of the container of a server that computes on an accelerator."""
        return self._with_options(host_memory(self.facts, span, self.dtype, self.page_size), span)

    def _with_options(self, memory: MemoryModel, span: Span) -> MemoryModel:
        size = adapter_bytes(self.facts, span, self.dtype, self.adapters, self.lora_rank)
        return replace(memory, adapters=size, training=self.training)


@dataclass(frozen=True, slots=True)
class Budget:
    """One memory of a server, what the server needs of it, and the field that sets it."""

    memory: int | None  # bytes; None: no limit, or not known
    field: str
    memory_of: Callable[[Span], MemoryModel]
    fraction: float = 1.0  # of the memory that the server may use

    @property
    def size(self) -> int | None:
        """Bytes that the server may use; None: no limit."""
        return None if self.memory is None else int(self.fraction * self.memory)

    def most_pages(self, span: Span) -> int | None:
        """Return the most pages of a server of this span; None: no limit."""
        return None if self.size is None else self.memory_of(span).most_pages(self.size)

    def needed(self, pages: int) -> Callable[[Span], int]:
        """Return the function of a span that tells the smallest memory of a server with these pages."""
        return lambda span: math.ceil(self.memory_of(span).needed(pages) / self.fraction)

    def __str__(self) -> str:
        text = human_bytes(self.size or 0)
        return text if self.fraction == 1 else f"{text} ({self.fraction:g} of the accelerator's)"

    def at_least(self, needed: int) -> str:
        """Return the value of the field with which a server that needs so many bytes fits."""
        return limit_at_least(math.ceil(needed / self.fraction))


def container_budget(memory: int | None, field: str, sizes: ServerSizes) -> Budget:
    whole = None if memory is None else memory // KERNEL_PAGE * KERNEL_PAGE
    return Budget(whole, field, sizes.in_container)


def pool_budgets(
    spec: Spec, sizes: ServerSizes, node_memory: Mapping[str, int]
) -> tuple[Budget, ...]:
    """Return the budgets that every server must keep; the first has its KV.

    `node_memory`: bytes of the accelerators by pool, as far as nodes tell it.
    """
    on_device = [pool for pool in spec.pools if has_accelerator(pool)]
    on_cpu = [pool for pool in spec.pools if not has_accelerator(pool)]
    budgets = []
    if on_cpu or not on_device:
        budgets.append(container_budget(_smallest_limit(spec, on_cpu), LIMITS, sizes))
    if on_device:
        memory = _smallest_device(spec, on_device, node_memory)
        budgets += _device_budgets(memory, _smallest_limit(spec, on_device), sizes)
    return tuple(budgets)


def machine_budgets(spec: Spec, sizes: ServerSizes) -> tuple[Budget, ...]:
    """Return the budgets of servers that all compute on the accelerators of this machine, whose memory is not known."""
    return _device_budgets(None, _smallest_limit(spec, spec.pools), sizes)


def _device_budgets(
    memory: int | None, limit: int | None, sizes: ServerSizes
) -> tuple[Budget, Budget]:
    """`memory`: bytes of the accelerator; `limit`: bytes of the container."""
    container = container_budget(limit, LIMITS, sizes)
    return (
        Budget(memory, DEVICE, sizes.on_device, MEMORY_FRACTION),
        Budget(container.memory, LIMITS, sizes.beside_device),
    )


def training_bytes(spec: Spec) -> int | None:
    """Return the memory of forward and backward passes that the document gives each server; None if it gives none."""
    wanted = spec.training.memory
    if wanted is None:
        return None
    return 0 if parse_quantity(wanted) == 0 else bytes_of(wanted, "spec.training.memory")


def _smallest_limit(spec: Spec, pools: Sequence[Pool]) -> int | None:
    """Return the smallest memory limit of these pools; None if none has one."""
    limits = [
        bytes_of(pool.resources.limits["memory"], f"{_path(spec, pool)}.resources.limits.memory")
        for pool in pools
        if "memory" in pool.resources.limits
    ]
    return min(limits, default=None)


def _smallest_device(
    spec: Spec, pools: Sequence[Pool], node_memory: Mapping[str, int]
) -> int | None:
    """Return the memory of the smallest accelerator; None if it is not known and not needed."""
    known: list[int] = []
    for pool in pools:
        field = f"{_path(spec, pool)}.accelerator.memory"
        if pool.accelerator is not None:
            known.append(bytes_of(pool.accelerator.memory, field))
        elif pool.name in node_memory:
            known.append(node_memory[pool.name])
        elif spec.sessions.concurrent is None or not _has_spans(spec):
            raise UserError(
                field,
                f"is needed, because pool {pool.name} has {describe_device(pool)} and {_missing_label(pool)}; allowed: "
                "the memory of the device, such as 80Gi, or without it both spec.sessions.concurrent and spec.spans",
            )
    return min(known) if len(known) == len(pools) else None


def _missing_label(pool: Pool) -> str:
    resource = next(iter(accelerators_of(pool.resources.limits)), "")
    if not resource:
        return "no label of a node tells the memory of a claimed device"
    return f"no node that matches it has the label {memory_label(resource)}"


def _has_spans(spec: Spec) -> bool:
    return spec.spans.count is not None or spec.spans.ranges is not None


def _path(spec: Spec, pool: Pool) -> str:
    return f"spec.pools[{spec.pools.index(pool)}]"
