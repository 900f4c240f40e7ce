"""What is checked at start-up, because each of these faults would otherwise give wrong text without an error.

Missing tensors and unknown layer types are refused while loading (`loading.py`); here the loaded span is run once.
Reference: the engine notes, section 1.2.
"""

from __future__ import annotations

from pathlib import Path

import torch

from modelswarm.errors import ModelSourceError
from modelswarm_serving.model.attention import attending
from modelswarm_serving.model.base import Work
from modelswarm_serving.model.batch import Batch
from modelswarm_serving.model.blocks import Blocks
from modelswarm_serving.model.pool import PagePool


@torch.inference_mode()
def check_span(blocks: Blocks, pool: PagePool, hidden: int, folder: Path) -> None:
    """Run two rows through all blocks and through none."""
    store = pool.keys[0]
    rows = torch.linspace(-1, 1, 2 * hidden, device=store.device).to(store.dtype).view(2, hidden)
    work = Work((0,), 0, 2, (0, pool.shape.blocks), None, b"", 0, None)
    if pool.shape.page_size == 1:
        work = Work((0, 1), 0, 2, (0, pool.shape.blocks), None, b"", 0, None)
    batch = Batch([work], pool.shape.page_size, pool.key_bytes, store.dtype, store.device)
    with attending(batch, pool) as context:
        blocks.run(rows, batch.positions, 0, pool.shape.blocks)
        calls = context.calls
        unchanged = blocks.run(rows, batch.positions, 0, 0)
    check_calls(calls, pool.shape.blocks, folder)
    check_identity(rows, unchanged, folder)


def check_calls(calls: int, blocks: int, folder: Path) -> None:
    """Some model classes ignore an attention name they do not know."""
    if calls != blocks:
        raise ModelSourceError(
            "model", f"{folder} cannot be served: its {blocks} blocks made {calls} attention calls"
        )


def check_identity(before: torch.Tensor, after: torch.Tensor, folder: Path) -> None:
    """Some models change the rows outside of their blocks, which a middle span would do once more."""
    if not torch.equal(before, after):
        raise ModelSourceError(
            "model", f"{folder} cannot be split: rows change outside of its blocks"
        )
