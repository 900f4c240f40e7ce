"""Self-check at start-up, for faults that would otherwise give wrong text without an error.

Called by `startup.py`. Missing tensors and unknown layer types are refused while loading (`loading.py`). Here the
loaded span is run once by the model's own forward, and once in its fused form over the served attention backend.
Captured decode steps run the same rows one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from modelswarm.errors import ModelSourceError, UserError
from modelswarm_serving.model.attention.attention import SDPA, AttentionCall, attention_context
from modelswarm_serving.model.attention.backend import AttentionBackend
from modelswarm_serving.model.attention.kv_cache import KvCache
from modelswarm_serving.model.attention.step_layout import Blocks, StepLayout
from modelswarm_serving.model.base import BatchItem
from modelswarm_serving.model.device import fault_text, memory_fault
from modelswarm_serving.model.transformer.decode_graphs import DecodeGraphs
from modelswarm_serving.model.transformer.generic_blocks import GenericBlocks
from modelswarm_serving.model.transformer.loading import LoadedSpan

_ROWS = 4
"""Rows of the self-check."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Allowed difference, relative to the largest value; a wrong operation differs by far more than rounding."""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """Rows of the self-check, and the output and attention calls of the model's own forward."""

    rows: Tensor
    layout: StepLayout
    output: Tensor
    calls: list[AttentionCall]


@torch.inference_mode()
def run_reference(
    loaded: LoadedSpan, blocks: GenericBlocks, cache: KvCache, folder: Path
) -> SelfCheck:
    """Run a few rows through all blocks and through no block, by the model's own forward."""
    shape, hidden = cache.shape, loaded.config.hidden_size
    # Rows that a layer norm keeps apart: with equal rows, any attention would give the same output.
    rows = torch.arange(_ROWS * hidden, device=cache.device).mul(1.7).sin().view(_ROWS, hidden)
    rows = rows.to(cache.dtype)
    count = min(_ROWS, shape.pages * shape.page_size)
    item = BatchItem(range(shape.pages), 0, count, (0, shape.blocks), None, b"", 0, None)
    layout = StepLayout([item], cache)
    calls: list[AttentionCall] = []
    try:
        with attention_context(layout, cache, calls):
            output = blocks.run(rows[:count], layout, 0, shape.blocks)
            unchanged = blocks.run(rows[:count], layout, 0, 0)
    except Exception as error:  # of values in config.json that only a forward reads
        if isinstance(error, RuntimeError) and _may_be_device_fault(error, cache.device):
            raise
        raise ModelSourceError(
            "model", f"{folder} cannot be served: its blocks fail: {fault_text(error)}"
        ) from error
    cache.clear(layout.rows)
    check_calls(calls, shape.blocks, folder)
    check_windows(calls, getattr(loaded.config, "layer_types", None), folder)
    check_identity(rows[:count], unchanged, folder)
    if not bool(output.isfinite().all()):
        raise not_finite_error(cache.dtype, "outputs")
    return SelfCheck(rows[:count], layout, output, calls)


def _may_be_device_fault(error: RuntimeError, device: torch.device) -> bool:
    return device.type != "cpu" or memory_fault(error) is not None


@torch.inference_mode()
def check_blocks(
    blocks: Blocks,
    check: SelfCheck,
    cache: KvCache,
    folder: Path,
    backend: AttentionBackend = SDPA,
) -> None:
    """Check that the served blocks and attention backend give the same output by the same attention calls."""
    calls: list[AttentionCall] = []
    with attention_context(check.layout, cache, calls, backend):
        output = blocks.run(check.rows, check.layout, 0, cache.shape.blocks)
    cache.clear(check.layout.rows)
    check_outputs(output, check.output, folder)
    if calls != check.calls:
        raise ModelSourceError("model", f"{folder} asks for attention that is not supported")


@torch.inference_mode()
def run_decode(
    blocks: Blocks, check: SelfCheck, cache: KvCache, max_length: int, backend: AttentionBackend
) -> None:
    """Run a decode row at the end of the pages: its kernels are others than those of `check_blocks`."""
    shape = cache.shape
    last = min(shape.pages * shape.page_size, max_length) - 1
    item = BatchItem(range(shape.pages), last, 1, (0, shape.blocks), None, b"", 0, None)
    layout = StepLayout([item], cache)
    with attention_context(layout, cache, backend=backend):
        blocks.run(check.rows[:1], layout, 0, shape.blocks)


@torch.inference_mode()
def check_decode(
    graphs: DecodeGraphs, rows: Tensor, expected: Tensor, cache: KvCache, folder: Path
) -> None:
    """Check that captured decode steps, one per row, give the output of the reference's one step."""
    shape, outputs = cache.shape, []
    for row in range(min(len(rows), graphs.positions, shape.pages * shape.page_size)):
        item = BatchItem(range(shape.pages), row, 1, (0, shape.blocks), None, b"", 0, None)
        layout = StepLayout([item], cache)
        outputs.append(graphs.run(rows[row : row + 1], layout).clone())
    cache.clear(len(rows))
    check_outputs(torch.cat(outputs), expected[: len(outputs)], folder)


def check_calls(calls: list[AttentionCall], blocks: int, folder: Path) -> None:
    """Check that every block called our attention: some model classes ignore an attention name they do not know."""
    if [call.index for call in calls] != list(range(blocks)):
        raise ModelSourceError(
            "model",
            f"{folder} cannot be served: its {blocks} blocks made {len(calls)} attention calls",
        )


def check_windows(
    calls: list[AttentionCall], layer_types: Sequence[str] | None, folder: Path
) -> None:
    """Check that each block asked for the window of its type: some classes have it in their mask alone."""
    for call, kind in zip(calls, layer_types or (), strict=False):
        if bool(call.window) != (kind == "sliding_attention"):
            raise ModelSourceError(
                "model",
                f"{folder} cannot be served: block {call.index} of the span is {kind}, "
                f"but it attends with a window of {call.window}",
            )


def check_identity(before: Tensor, after: Tensor, folder: Path) -> None:
    """Check that no block means no change: some models change rows outside their blocks, and a middle span would do
    that again."""
    if not torch.equal(before, after):
        raise ModelSourceError(
            "model", f"{folder} cannot be split: rows change outside of its blocks"
        )


def check_outputs(output: Tensor, expected: Tensor, folder: Path) -> None:
    """Check that the fused blocks compute what the model class computes."""
    limit = _TOLERANCE[expected.dtype] * float(expected.abs().max())
    worst = float((output - expected).abs().max())
    if not math.isfinite(worst):
        raise not_finite_error(expected.dtype, "outputs")
    if not worst <= limit:
        raise ModelSourceError(
            "model", f"{folder} cannot be served: its blocks differ from the model's by {worst:.2g}"
        )


def not_finite_error(dtype: torch.dtype, values: str) -> UserError:
    """Return the error of a model whose values leave the range of this format, or are not finite in any."""
    name = str(dtype).removeprefix("torch.")
    wider = " or ".join(each for each in ("bfloat16", "float32") if each != name)
    advice = f"allowed: {wider} (spec.model.dtype)"
    if dtype is torch.float32:
        advice = "needed: a checkpoint whose weights are finite"
    return UserError("dtype", f"the model's {values} are not finite in {name}; {advice}")
