"""Chooses the layout of a span's weights on a CPU: measured at start, for the batch sizes that the server may run.

The best layout depends on machine, dtype and rows of a step, so no table is right for all. Called by
`served_blocks.py` before the self-check. A measurement re-lays one matrix at a time, and leaves some in any layout.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from modelswarm_serving.model.linear.layouts import AUTO, WeightLayout
from modelswarm_serving.model.linear.weight import Weight, usable_layouts

_MIN_BYTES = 32 << 20
"""Weights of a span below which nothing is measured: a layout saves them less than a millisecond per step."""
_SAMPLE_BYTES = 96 << 20
"""Weights that are measured, more than the caches of a CPU hold."""
_MAX_ROWS = 32
_ROUNDS = 4
_GAIN = 0.1
"""Share by which a layout must be faster than those before it in `_PREFERRED`, so that noise does not choose. Replicas
on equal machines should have the same layout, as it is a part of their numerics class."""
_PREFERRED = (WeightLayout.TRANSPOSED, WeightLayout.PACKED, WeightLayout.PLAIN)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """The layout of a span's weights. `seconds`: of all measured products, by layout and rows; empty: not measured."""

    layout: WeightLayout = WeightLayout.TRANSPOSED
    seconds: Mapping[WeightLayout, Mapping[int, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        if not self.seconds:
            return f"weights {self.layout}, not measured"
        times = "; ".join(
            f"{layout} "
            + ", ".join(f"{rows} rows {value * 1e3:.1f} ms" for rows, value in found.items())
            for layout, found in self.seconds.items()
        )
        return f"weights {self.layout} by measured products: {times}"


UNMEASURED = LayoutChoice()


def batch_sizes(sessions: int) -> tuple[int, ...]:
    """Return the rows of a decode step with one session, with all, and between."""
    most = max(1, min(sessions, _MAX_ROWS))
    return tuple(sorted({1, math.isqrt(most), most}))


def is_large(elements: int, dtype: torch.dtype) -> bool:
    """Return True if a layout of so many weights is worth a measurement."""
    return elements * dtype.itemsize >= _MIN_BYTES


@torch.no_grad()  # not inference_mode: passes save these weights for their gradients
def choose_layout(
    weights: Sequence[Weight], dtype: torch.dtype, sessions: int, wanted: str = AUTO
) -> LayoutChoice:
    """Return the wanted layout, or the fastest for up to `sessions` sessions; the caller lays out the weights.

    `wanted` must be `auto` or one of `usable_layouts`.
    """
    if wanted != AUTO:
        return LayoutChoice(WeightLayout(wanted))
    if not is_large(sum(weight.size for weight in weights), dtype):
        return UNMEASURED
    return _measure(_sample(weights, dtype), dtype, batch_sizes(sessions))


def best_layout(seconds: Mapping[WeightLayout, Mapping[int, float]]) -> WeightLayout:
    """Return the layout that takes the fewest seconds for one step of each size; a small gain does not count."""
    totals = {layout: math.fsum(found.values()) for layout, found in seconds.items()}
    best, *others = (layout for layout in _PREFERRED if layout in totals)
    for layout in others:
        if totals[layout] < totals[best] * (1 - _GAIN):
            best = layout
    return best


def _sample(weights: Sequence[Weight], dtype: torch.dtype) -> list[Weight]:
    found: list[Weight] = []
    size = 0
    for weight in weights:
        if size >= _SAMPLE_BYTES:
            break
        found.append(weight)
        size += weight.size * dtype.itemsize
    return found


def _measure(weights: Sequence[Weight], dtype: torch.dtype, rows: Sequence[int]) -> LayoutChoice:
    """Measure all layouts in turn, several times: a load that comes or goes meets each of them."""
    inputs = {
        count: {weight.inputs: torch.ones(count, weight.inputs, dtype=dtype) for weight in weights}
        for count in rows
    }
    seconds: dict[WeightLayout, dict[int, float]] = {}
    for layout in usable_layouts(dtype) * _ROUNDS:
        for weight in weights:
            weight.lay_out(layout)
        found = seconds.setdefault(layout, dict.fromkeys(rows, math.inf))
        for count in rows:
            found[count] = min(found[count], _time_products(weights, inputs[count]))
    return LayoutChoice(best_layout(seconds), seconds)


def _time_products(weights: Sequence[Weight], inputs: Mapping[int, Tensor]) -> float:
    # Time in which this thread waits for others of the machine does not count, if it computes alone.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    began = clock()
    for weight in weights:
        weight.multiply(inputs[weight.inputs])
    return clock() - began
