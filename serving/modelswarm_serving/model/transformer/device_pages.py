"""Number of KV pages on an accelerator: what its memory leaves after weights, captured steps and one measured step.

Used by `startup.py` where the device is not the CPU. The step is the largest of the scheduler, at the end of the
longest context, so that no later step needs more. Knows no files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from modelswarm.errors import DeviceError
from modelswarm.placement.memory import (
    CONTEXT_BYTES,
    LOGIT_ROWS,
    MEMORY_FRACTION,
    PREFILL_ROWS,
)
from modelswarm.placement.quantity import human_bytes
from modelswarm.protocol.messages import FaultKind, Sampling
from modelswarm_serving.model.base import (
    BatchItem,
    ModelShape,
    OutOfDeviceMemory,
    SampleRequest,
    Task,
)
from modelswarm_serving.model.device import Device
from modelswarm_serving.model.transformer.self_check import not_finite_error
from modelswarm_serving.model.transformer.span import TransformerSpan

_SAMPLING = Sampling(temperature=1.0, repetition_penalty=1.1)
"""Parameters with the largest tables of the sampler: a copy of the scores, and noise for the whole vocabulary."""
_MOST_WARM_UP_ROWS = 256
"""Rows that fill a GPU of up to 255 processors, two programs on each, so that no row is cut."""


@dataclass(frozen=True, slots=True)
class DeviceRoom:
    """The memory of a device that holds the weights and captured decode steps, in bytes."""

    total: int
    used: int  # by weights, captured steps, the driver, and other processes beyond their share
    step: int  # of the largest step
    fraction: float  # of the total that may be used
    training: int = 0  # reserved for forward and backward passes

    @property
    def free(self) -> int:
        """Bytes for KV; below 0 if even the step does not fit."""
        return int(self.fraction * self.total) - self.used - self.step - self.training

    def __str__(self) -> str:
        passes = f"passes {human_bytes(self.training)}, " if self.training else ""
        return (
            f"{human_bytes(max(self.free, 0))} of {human_bytes(self.total)} are left for KV (weights, captured steps, "
            f"driver and other processes {human_bytes(self.used)}, the largest step {human_bytes(self.step)}, {passes}"
            f"unused by --memory-fraction {human_bytes(int((1 - self.fraction) * self.total))})"
        )


def check_weights_fit(
    device: Device, shape: ModelShape, weights: int, fraction: float | None
) -> None:
    """Raise DeviceError before anything is read if the weights alone are too large for the device."""
    free, total = device.drivers.memory(device.torch)
    usable = min(free, int((fraction or MEMORY_FRACTION) * total))
    if weights > usable:
        raise DeviceError(
            f"--device: {device} has too little memory for blocks {shape.first}:{shape.last}: their weights need "
            f"{human_bytes(weights)}, and {human_bytes(usable)} are usable ({human_bytes(free)} are free); allowed: "
            "fewer blocks, or a larger device"
        )


def probe_pages(shape: ModelShape, token_budget: int) -> int:
    """Return the pages of the small cache with which the step is measured."""
    return -(-min(token_budget + PREFILL_ROWS, shape.max_length) // shape.page_size)


def measure_room(
    span: TransformerSpan,
    device: Device,
    token_budget: int,
    fraction: float | None,
    training: int = 0,
) -> DeviceRoom:
    """Run the largest step of a span whose cache has `probe_pages`, and return the room beside that cache.

    Also run decode steps of all kinds, for which kernels are compiled now and not under a session. `training`: bytes
    that passes get. A fraction below the usual one leaves the rest to other servers, which may have taken it already.
    """
    drivers, fraction = device.drivers, fraction or MEMORY_FRACTION
    shape = span.shape
    cache = shape.total_pages * shape.page_size * (shape.last - shape.first) * shape.kv_bytes
    try:
        for rows in warm_up_rows(token_budget):
            span.step([_item(shape, 1, samples=False) for _ in range(rows)])
        before = drivers.start_peak(device.torch)
        results = span.step(largest_step(shape, token_budget))
    except OutOfDeviceMemory as error:
        raise DeviceError(
            f"--device: {device} has too little memory for one step of {token_budget} rows of blocks "
            f"{shape.first}:{shape.last} ({error}); allowed: fewer blocks, a smaller --token-budget or "
            "--max-length, or a larger device"
        ) from error
    if any(result.fault is FaultKind.NOT_FINITE for result in results):
        raise not_finite_error(span.dtype, "logits")
    faults = {result.error for result in results} - {None}
    assert not faults, faults
    step = drivers.peak(device.torch) - before
    drivers.free_caches()
    free, total = drivers.memory(device.torch)
    others = max(0, int((MEMORY_FRACTION - fraction) * total))
    context = min(CONTEXT_BYTES, total // 64) if others else 0  # its own, which `others` may hide
    used = max(before - cache + context, total - free - cache - others)
    return DeviceRoom(total, used, step, fraction, training)


def warm_up_rows(token_budget: int) -> list[int]:
    """Return the sequences of decode steps for which an attention kernel may be another one.

    The keys of a row are cut into parts, as many as fill the device, and each number of parts is a kernel. At the end
    of the longest context these steps have all numbers.
    """
    most = min(token_budget, _MOST_WARM_UP_ROWS)
    return [1 << power for power in range(most.bit_length())]


def largest_step(shape: ModelShape, token_budget: int) -> list[Task]:
    """Return a step of all rows that the scheduler may plan: decode rows, then prefill at the end of the context.

    The pages of the small cache repeat, so that every position has one. Its content does not matter.
    """
    rows = token_budget + PREFILL_ROWS
    decode = min(LOGIT_ROWS, rows // 2)
    counts = [1] * decode
    while rest := rows - sum(counts):
        counts.append(min(rest, shape.max_length))
    return [_item(shape, count, samples=index < decode) for index, count in enumerate(counts)]


def _item(shape: ModelShape, count: int, *, samples: bool) -> BatchItem:
    end = shape.max_length
    is_head, is_tail = shape.first == 0, shape.last == shape.n_blocks
    pages = [page % shape.total_pages for page in range(-(-end // shape.page_size))]
    log = [0] * end
    return BatchItem(
        pages=pages,
        first=end - count,
        count=count,
        blocks=(shape.first, shape.last),
        tokens=log[:count] if is_head else None,
        rows=None if is_head else bytes(count * shape.row_bytes),
        emit_from=end if is_tail else end - count,
        sample=SampleRequest(_SAMPLING, end, log, begin=0) if is_tail and samples else None,
    )


def choose_pages(
    room: DeviceRoom, device: Device, shape: ModelShape, wanted: int | None, most: int | None
) -> int:
    """Return the wanted pages, or as many as fit; DeviceError with the numbers if they do not fit.

    `most`: pages whose retained rows fit into the container; None: any number.
    """
    page = shape.page_size * (shape.last - shape.first) * shape.kv_bytes
    fitting = room.free // page
    filling = fitting if most is None else min(fitting, most)
    pages = max(filling, 1) if wanted is None else wanted
    if pages > fitting:
        raise DeviceError(
            f"--device: {device} has too little memory for blocks {shape.first}:{shape.last}: {pages} pages of KV "
            f"need {human_bytes(pages * page)}, but {room}; allowed: fewer blocks, at most {max(fitting, 0)} pages "
            "(fewer sessions), or a larger device"
        )
    return pages


def with_pages(shape: ModelShape, pages: int) -> ModelShape:
    return replace(shape, total_pages=pages)


def out_of_memory_error(device: Device, shape: ModelShape, fault: str) -> DeviceError:
    """Return the error of a device that was full while blocks were loaded."""
    return DeviceError(
        f"--device: {device} has too little memory for blocks {shape.first}:{shape.last}: "
        f"{fault}; allowed: fewer blocks, or a larger device"
    )
