"""Blocks on servers as a function of torch's autograd: hidden states and prompts in, hidden states out.

The weights are frozen. A backward pass sends the inputs and the gradients of the outputs, and gets those of the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from modelswarm.client.sessions.connection import ServedModel
from modelswarm.client.tensors import pack_rows, side_by_side, unpack_rows
from modelswarm.client.training.passes import Batch, BatchTooLargeError, BlockPasses, Piece

# Bytes of rows that run in one call, if that is not less than one sequence.
BATCH_BYTES = 2 << 20
# Calls of one pass at a time.
MAX_PASSES = 8


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences [begin, end) of the batch, and the prompts that are added to them."""

    begin: int
    end: int
    batch: Batch

    def halves(self) -> tuple[_Group, _Group]:
        middle = (self.begin + self.end) // 2
        lengths, count = self.batch.lengths, middle - self.begin
        return (
            _Group(self.begin, middle, replace(self.batch, lengths=lengths[:count])),
            _Group(middle, self.end, replace(self.batch, lengths=lengths[count:])),
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """A group that was run forward: its output, and the inputs that its way back needs."""

    group: _Group
    rows: bytes
    pieces: list[Piece]


class RemoteRange:
    """Blocks [first, last), with which tensors are run forward and back."""

    def __init__(self, passes: BlockPasses, served: ServedModel, first: int, last: int) -> None:
        self._passes, self._served = passes, served
        self.first, self.last = first, last

    def __call__(self, states: Tensor, keep: Tensor, prompts: Tensor | None) -> Tensor:
        """Return the states [batch, length, hidden] behind the blocks, zeros where `keep` [batch, length] is False.

        `prompts`: [blocks, rows, hidden], or [blocks, batch, rows, hidden]. They are added to the first kept states of
        each sequence before each block.
        """
        found: Tensor = _Blocks.apply(self, keep, states, prompts)
        return found

    # ---- for the function

    def groups(self, keep: Tensor, prompts: Tensor | None) -> list[_Group]:
        """Return the sequences in groups. Each row with prompts of its own is one."""
        lengths = [int(row.sum()) for row in keep]
        is_own = prompts is not None and prompts.dim() == 4
        most = max(1, BATCH_BYTES // self._served.row_bytes)
        made: list[_Group] = []
        begin = 0
        while begin < len(lengths):
            end, rows = begin + 1, lengths[begin]
            while end < len(lengths) and not is_own and rows + lengths[end] <= most:
                rows += lengths[end]
                end += 1
            given = prompts[:, begin] if is_own and prompts is not None else prompts
            made.append(_Group(begin, end, self._batch(lengths[begin:end], given)))
            begin = end
        return made

    def _batch(self, lengths: Sequence[int], prompts: Tensor | None) -> Batch:
        if prompts is None:
            return Batch(tuple(lengths), 0, (), self.first)
        rows = tuple(pack_rows(each, self._served) for each in prompts)
        return Batch(tuple(lengths), prompts.shape[1], rows, self.first)

    def run_forward(
        self, states: Tensor, keep: Tensor, groups: Sequence[_Group]
    ) -> tuple[Tensor, list[_Run]]:
        """Return the states behind the blocks, and the groups as they were run."""

        def run(group: _Group) -> list[_Run]:
            part = slice(group.begin, group.end)
            given = pack_rows(states[part][keep[part]], self._served)
            try:
                rows, pieces = self._passes.run_forward(self.first, self.last, group.batch, given)
            except BatchTooLargeError:
                if group.end - group.begin == 1:
                    raise
                return [each for half in group.halves() for each in run(half)]
            return [_Run(group, rows, pieces)]

        runs = [each for found in side_by_side(run, groups, most=MAX_PASSES) for each in found]
        output = torch.zeros_like(states)
        output[keep] = torch.cat([unpack_rows(each.rows, self._served) for each in runs]).to(output)
        return output, [replace(each, rows=b"") for each in runs]

    def run_backward(
        self, gradients: Tensor, keep: Tensor, runs: Sequence[_Run]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the gradients of the states, and those of each group's prompts [blocks, rows, hidden]."""

        def run(one: _Run) -> tuple[Tensor, Tensor]:
            part = slice(one.group.begin, one.group.end)
            wanted = pack_rows(gradients[part][keep[part]], self._served)
            found = self._passes.run_backward(one.pieces, one.group.batch, wanted)
            return unpack_rows(found.rows, self._served), unpack_rows(found.prompts, self._served)

        results = side_by_side(run, runs, most=MAX_PASSES)
        found = torch.zeros_like(gradients)
        found[keep] = torch.cat([rows for rows, _ in results]).to(found)
        hidden = self._served.hidden_size
        return found, [each.view(self.last - self.first, -1, hidden) for _, each in results]


class _Blocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, blocks: RemoteRange, keep: Tensor, states: Tensor, prompts: Tensor | None
    ) -> Tensor:
        ctx.blocks, ctx.keep = blocks, keep
        ctx.prompts = None if prompts is None else (prompts.shape, prompts.dtype, prompts.device)
        found, ctx.runs = blocks.run_forward(states, keep, blocks.groups(keep, prompts))
        ctx.save_for_backward(states)  # so that a second backward pass is torch's own error
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[None, None, Tensor, Tensor | None]:
        (states,) = ctx.saved_tensors
        found, parts = ctx.blocks.run_backward(gradients, ctx.keep, ctx.runs)
        return None, None, found.to(states), _prompt_gradients(ctx.prompts, parts)


def _prompt_gradients(given: Any, parts: Sequence[Tensor]) -> Tensor | None:
    if given is None:
        return None
    shape, dtype, device = given
    exact = torch.stack([part.float() for part in parts], dim=1)  # [blocks, groups, rows, hidden]
    found = exact if len(shape) == 4 else exact.sum(1)
    return found.to(device, dtype)
