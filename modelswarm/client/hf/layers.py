"""`model.model.layers`: the blocks of a model, called with hidden states as blocks of transformers are.

A call without gradients runs rows of a batch side by side, each in a session of its own. A call with gradients is a
pass (`client/training/`), without sessions. Knows no tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from modelswarm.client.hf.errors import ArgumentError, UnsupportedArgumentError
from modelswarm.client.hf.inputs import check_length
from modelswarm.client.hf.values import check_integer
from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.block_session import BlockSession
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import NoCapacityError, SessionBusyError
from modelswarm.client.tensors import pack_rows, side_by_side, unpack_rows
from modelswarm.client.training.autograd import RemoteRange
from modelswarm.client.training.passes import BlockPasses


class RemoteLayers(nn.Module):
    """Blocks [first, last) of a model on the servers of a swarm.

    `layers[3:7]` is a range of them, `layers[3]` a range of one block, and iteration gives each block. A range may
    begin and end anywhere, also inside of a server's blocks.
    """

    def __init__(self, connection: Connection, served: ServedModel, first: int, last: int) -> None:
        super().__init__()
        self._connection, self._served = connection, served
        self.first, self.last = first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, place: int | slice) -> RemoteLayers:
        if isinstance(place, slice):
            for part in (place.start, place.stop, place.step):
                if part is not None and not is_integer(part):
                    raise ArgumentError("layers", f"{part!r} in a slice; allowed: integers")
            if place.step == 0:
                raise ArgumentError("layers", "a step of 0; allowed: 1, blocks in their order")
            start, stop, step = place.indices(len(self))
            if step != 1:
                raise ArgumentError(
                    "layers", f"a step of {step}; allowed: 1, blocks in their order"
                )
            if start >= stop:
                detail = f"allowed: at least one of the {len(self)} blocks"
                raise ArgumentError(
                    "layers", f"[{place.start}:{place.stop}] has no block; {detail}"
                )
        else:
            if not is_integer(place):
                detail = "allowed: an integer, or a slice of integers"
                raise ArgumentError("layers", f"[{place!r}] is no place of a block; {detail}")
            if not -len(self) <= place < len(self):
                raise IndexError(f"layers[{place}]: there are {len(self)} blocks")
            start = place % len(self)
            stop = start + 1
        first = self.first + start
        return RemoteLayers(self._connection, self._served, first, self.first + stop)

    def __iter__(self) -> Iterator[RemoteLayers]:
        return (self[place] for place in range(len(self)))

    def extra_repr(self) -> str:
        return f"blocks {self.first}:{self.last} of {self._served.name}"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        prompts: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states [batch, length, hidden] behind these blocks, in the dtype of the input.

        `attention_mask` [batch, length]: 0 for padding, whose rows are zeros in the result. `prompts` [blocks, rows,
        hidden], or [blocks, batch, rows, hidden]: added to the first rows of each sequence before each block. Gradients
        flow to states and prompts; the blocks are frozen.

        Raise ArgumentError for other shapes, dtypes and numbers that are not finite, NoCapacityError without room.
        """
        hidden = self._served.hidden_size
        check_states(hidden_states, hidden)
        keep = kept_rows(hidden_states, attention_mask)
        if prompts is not None or (torch.is_grad_enabled() and hidden_states.requires_grad):
            check_prompts(prompts, len(self), keep, hidden)
            passes = BlockPasses(self._connection, self._served)
            return RemoteRange(passes, self._served, self.first, self.last)(
                hidden_states, keep, prompts
            )
        lengths = [int(row.sum()) for row in keep]
        with self.inference_session(max_length=max(lengths), batch_size=len(keep)) as session:
            parts = session._run([row[kept] for row, kept in zip(hidden_states, keep, strict=True)])
        found = torch.zeros_like(hidden_states)
        for place, part in enumerate(parts):
            found[place, keep[place]] = part.to(found)
        return found

    def inference_session(
        self, *, max_length: int, batch_size: int = 1, ttl: int | None = None
    ) -> LayersSession:
        """Open a session of these blocks that keeps their KV for `max_length` positions; use it by `with`.

        `ttl`: seconds that it is kept without a step. Raise NoCapacityError if the servers have no room.
        """
        return LayersSession(
            self._connection, self._served, (self.first, self.last), max_length, batch_size, ttl
        )


class LayersSession:
    """The KV of a range of blocks: `step` appends positions, `position` says how many there are."""

    def __init__(
        self,
        connection: Connection,
        served: ServedModel,
        blocks: tuple[int, int],
        max_length: int,
        batch_size: int,
        ttl: int | None,
    ) -> None:
        check_integer("batch_size", batch_size, 1)
        check_length(max_length, served.context)
        self._served, self.max_length = served, max_length
        self._step = threading.Lock()
        self._rows: list[BlockSession] = []
        with ExitStack() as opened:
            for _ in range(batch_size):
                try:
                    row = BlockSession(connection, served, blocks, max_length, ttl=ttl)
                except NoCapacityError as error:
                    raise error.of_rows(len(self._rows), batch_size) from error
                self._rows.append(opened.enter_context(row))
            self._exit = opened.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the room of all rows. A second call does nothing."""
        self._exit.close()

    @property
    def position(self) -> int:
        """Positions of each row. Assign a smaller number to go back."""
        return self._rows[0].position

    @position.setter
    def position(self, value: int) -> None:
        for row in self._rows:
            row.position = value

    def step(self, hidden_states: Tensor, prompts: Any = None, hypo_ids: Any = None) -> Tensor:
        """Append positions [batch, new, hidden], and return their hidden states behind the blocks.

        `prompts` and `hypo_ids` of Petals are refused by name. Nothing is sent for an input without positions.

        Raise ArgumentError for a wrong input, SessionLengthError for more than max_length positions,
        SessionClosedError, SessionBusyError. A step that fails appends nothing to any row: it can be repeated.
        """
        if prompts is not None:
            detail = (
                "a session has none; call the blocks themselves, as layers(hidden, prompts=prompts)"
            )
            raise UnsupportedArgumentError("prompts", detail)
        if hypo_ids is not None:
            detail = "rows are not reordered; beams are sessions of `generate`"
            raise UnsupportedArgumentError("hypo_ids", detail)
        check_states(hidden_states, self._served.hidden_size, may_be_empty=True)
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            detail = (
                "a session gives no gradients; call the blocks themselves, or use torch.no_grad()"
            )
            raise UnsupportedArgumentError("hidden_states", detail)
        if len(hidden_states) != len(self._rows):
            detail = f"the session was opened for {len(self._rows)} (batch_size)"
            raise ArgumentError("hidden_states", f"{len(hidden_states)} rows; {detail}")
        if not hidden_states.shape[1]:
            return hidden_states.clone()
        return torch.stack(self._run(list(hidden_states))).to(hidden_states)

    def _run(self, rows: list[Tensor]) -> list[Tensor]:
        """Return the result of each [length, hidden], side by side."""

        def run(session: BlockSession, row: Tensor) -> Tensor:
            return unpack_rows(session.run_rows(pack_rows(row, self._served)), self._served)

        if not self._step.acquire(blocking=False):
            raise SessionBusyError("the session runs a step; one thread at a time may use it")
        before = [session.position for session in self._rows]
        try:
            return side_by_side(run, self._rows, rows)
        except BaseException:
            for session, position in zip(self._rows, before, strict=True):
                if session.position > position:
                    session.position = position
            raise
        finally:
            self._step.release()


def check_states(states: Any, hidden: int, *, may_be_empty: bool = False) -> None:
    """Raise ArgumentError unless these are hidden states [batch, length, hidden] that servers take."""
    if not isinstance(states, Tensor):
        raise ArgumentError("hidden_states", f"a {type(states).__name__}; allowed: a tensor")
    shape = list(states.shape)
    if states.dim() != 3 or shape[2] != hidden or not shape[0] or not (shape[1] or may_be_empty):
        detail = f"allowed: [batch, length, {hidden}], with at least one position"
        raise ArgumentError("hidden_states", f"the shape is {shape}; {detail}")
    if not states.is_floating_point():
        raise ArgumentError("hidden_states", f"the dtype is {states.dtype}; allowed: floats")
    if not bool(states.isfinite().all()):
        raise ArgumentError("hidden_states", "a number is infinite or NaN; all must be finite")


def check_prompts(prompts: Any, blocks: int, keep: Tensor, hidden: int) -> None:
    """Raise ArgumentError unless these are None, or prompts of so many blocks for the rows that are kept."""
    if prompts is None:
        return
    if not isinstance(prompts, Tensor):
        raise ArgumentError("prompts", f"a {type(prompts).__name__}; allowed: a tensor")
    shape = list(prompts.shape)
    own = [blocks, len(keep), *shape[2:]]
    rows = shape[-2] if prompts.dim() > 2 else 0
    wrong = shape not in ([blocks, rows, hidden], own) or shape[-1] != hidden or not rows
    if prompts.dim() not in (3, 4) or wrong:
        detail = f"allowed: [{blocks}, rows, {hidden}], or [{blocks}, {len(keep)}, rows, {hidden}]"
        raise ArgumentError("prompts", f"the shape is {shape}; {detail}")
    if not prompts.is_floating_point():
        raise ArgumentError("prompts", f"the dtype is {prompts.dtype}; allowed: floats")
    if not bool(prompts.isfinite().all()):
        raise ArgumentError("prompts", "a number is infinite or NaN; all must be finite")
    shortest = int(keep.sum(-1).min())
    if rows > shortest:
        detail = f"the shortest sequence has {shortest}"
        raise ArgumentError("prompts", f"{rows} rows; {detail}")


def kept_rows(states: Tensor, mask: Tensor | None) -> Tensor:
    """Return which positions [batch, length] are no padding. Raise ArgumentError for a wrong mask."""
    if mask is None:
        return torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    if not isinstance(mask, Tensor) or mask.shape != states.shape[:2]:
        shape = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        detail = f"allowed: that of the rows, {list(states.shape[:2])}"
        raise ArgumentError("attention_mask", f"the shape is {shape}; {detail}")
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ArgumentError("attention_mask", "allowed values: 0 for padding, 1 for rows")
    keep = mask.bool()
    if not bool(keep.any(-1).all()):
        raise ArgumentError("attention_mask", "a sequence has no row that is not padding")
    return keep
