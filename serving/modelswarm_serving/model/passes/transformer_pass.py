"""Computes passes by the span's own blocks, part by part.

The parts of a block run in order, and each keeps its keys and values for the next ones. On the way back they run in
reverse order: then the gradients of a part's keys and values are complete when its turn comes. So the memory of a part
is that of its own rows, whatever the length of the sequence. Knows no calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from modelswarm_serving.model.attention.attention import part_context
from modelswarm_serving.model.attention.staging import current_device, to_device, to_host
from modelswarm_serving.model.attention.step_layout import Blocks
from modelswarm_serving.model.base import ModelShape
from modelswarm_serving.model.device import Device, run_on
from modelswarm_serving.model.passes.contract import PassTask
from modelswarm_serving.model.passes.parts import Part, PartAttention, PartLayout, split_parts


@dataclass(frozen=True, slots=True)
class PassForm:
    """The form in which a span computes its passes."""

    shape: ModelShape
    dtype: torch.dtype
    device: Device
    part_rows: int


class TransformerPass:
    """One pass. Rows of all sequences are one tensor [rows, hidden]; KV of a block is one, too.

    It makes no tensor before the first `advance`: a copy to the device waits for the step that runs there.
    """

    def __init__(
        self,
        blocks: Blocks,
        form: PassForm,
        task: PassTask,
        data: bytes | bytearray,
    ) -> None:
        self._blocks, self._shape, self._task = blocks, form.shape, task
        self._dtype, self._device = form.dtype, form.device
        self._data: bytes | bytearray | None = data
        self._parts = split_parts(task.lengths, form.part_rows)
        self._layouts: list[PartLayout] = []
        self._places: Tensor  # of the rows to which prompts are added, [sequences, prompt_rows]
        self._result: list[Tensor] = []
        self._work = self._run()

    def advance(self) -> bool:
        """Run a part; OutOfDeviceMemory if the device has too little memory for it."""
        with current_device(self._device.torch):
            return run_on(self._device, lambda: next(self._work, None) is None)

    def result(self) -> bytes:
        parts = [to_host(part.contiguous().view(torch.uint8)) for part in self._result]
        self._result = []
        return b"".join(part.numpy().tobytes() for part in parts)

    def _run(self) -> Iterator[bool]:
        """Yield after each part but the last."""
        task = self._task
        self._lay_out()
        rows, prompts, gradients = self._read_input()
        inputs: list[Tensor] = []
        stores: list[Tensor] = []
        blocks = range(*task.blocks)
        for place, block in enumerate(blocks):
            rows = self._add_prompt(rows, prompts[place])
            output = torch.empty_like(rows)
            store: Tensor | None = None
            for number in range(len(self._parts)):
                store = self._run_part(block, number, rows, store, output)
                yield True
            assert store is not None
            if task.is_backward:
                inputs.append(rows)
                stores.append(store)
            rows = output
        if not task.is_backward:
            self._result = [rows]
            return
        prompt_gradients = torch.zeros_like(prompts)
        for place, block in reversed(list(enumerate(blocks))):
            rows, store = inputs.pop(), stores.pop()
            behind = torch.zeros(store.shape, dtype=torch.float32, device=self._device.torch)
            found = torch.empty_like(rows)
            for number in reversed(range(len(self._parts))):
                found[self._parts[number].rows] = self._run_back(
                    block, number, rows, store, gradients, behind
                )
                yield True
            if task.prompt_rows:
                prompt_gradients[place] = found[self._places].sum(0, dtype=torch.float32)
            gradients = found
        self._result = [gradients, prompt_gradients]

    def _lay_out(self) -> None:
        task, device = self._task, self._device.torch
        self._layouts = [PartLayout(part, device) for part in self._parts]
        lengths = torch.tensor(task.lengths)
        places = (lengths.cumsum(0) - lengths)[:, None] + torch.arange(task.prompt_rows)
        self._places = places.to(device)

    def _read_input(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [rows, hidden], prompts [blocks, prompt rows, hidden] and gradients of the output rows."""
        task, data = self._task, self._data
        assert data is not None
        self._data = None
        flat = torch.frombuffer(bytearray(data), dtype=self._dtype)
        every = to_device(flat, self._device.torch).view(
            -1, self._shape.row_bytes // self._dtype.itemsize
        )
        rows, rest = every[: task.rows], every[task.rows :]
        prompts, gradients = rest[: task.prompts], rest[task.prompts :]
        blocks = task.blocks[1] - task.blocks[0]
        return rows, prompts.view(blocks, task.prompt_rows, rows.shape[1]), gradients

    def _add_prompt(self, rows: Tensor, prompt: Tensor) -> Tensor:
        if not self._task.prompt_rows:
            return rows
        changed = rows.clone()
        changed[self._places] += prompt
        return changed

    @torch.no_grad()
    def _run_part(
        self, block: int, number: int, rows: Tensor, store: Tensor | None, output: Tensor
    ) -> Tensor:
        """Run a part of the block's rows into `output`. Return the block's KV, which the first part makes."""
        part = self._parts[number]
        attention = PartAttention(part, _past_of(part, store))
        output[part.rows] = self._run_block(block, number, rows[part.rows], attention)
        (fresh,) = attention.fresh
        if store is None:
            store = fresh.new_empty((len(rows), *fresh.shape[1:]))
        store[part.rows] = fresh
        return store

    @torch.enable_grad()
    def _run_back(
        self,
        block: int,
        number: int,
        rows: Tensor,
        store: Tensor,
        gradients: Tensor,
        behind: Tensor,
    ) -> Tensor:
        """Return the gradients of a part's rows, and add those of the KV before it to `behind`."""
        part = self._parts[number]
        given = rows[part.rows].detach().requires_grad_()
        past = [None if each is None else each.requires_grad_() for each in _past_of(part, store)]
        attention = PartAttention(part, past)
        output = self._run_block(block, number, given, attention)
        (fresh,) = attention.fresh
        leaves = [each for each in past if each is not None]
        found = torch.autograd.grad(
            (output, fresh),
            (given, *leaves),
            (gradients[part.rows], behind[part.rows].to(fresh.dtype)),
        )
        pieces = [piece for piece, each in zip(part.pieces, past, strict=True) if each is not None]
        for piece, gradient in zip(pieces, found[1:], strict=True):
            behind[piece.before] += gradient
        return found[0]

    def _run_block(self, block: int, number: int, rows: Tensor, attention: PartAttention) -> Tensor:
        at = block - self._shape.first
        with part_context(attention):
            return self._blocks.run(rows, self._layouts[number], at, at + 1)


def _past_of(part: Part, store: Tensor | None) -> list[Tensor | None]:
    """Return the KV of the rows before each piece; None for a piece without any."""
    return [
        None if store is None or not piece.first else store[piece.before].detach()
        for piece in part.pieces
    ]
