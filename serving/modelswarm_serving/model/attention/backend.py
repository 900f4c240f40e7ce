"""The contract of attention backends: what a step asks of them, and what CUDA graphs ask besides.

`attention.py` has the reference, for every device. `triton_attention.py` reads pages in place and can be captured.
`selection.py` chooses. Model code calls `attention.attend` and never sees a backend or a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from modelswarm_serving.model.attention.step_layout import RowLayout, StepLayout


@dataclass(frozen=True, slots=True)
class Scoring:
    """The way from a product of query and key to a score; slopes and sinks are per query head."""

    scaling: float
    window: int | None = None  # keys that a row sees, itself included; None: all before it
    softcap: float | None = None  # scores become softcap * tanh(score / softcap)
    slopes: Tensor | None = (
        None  # [heads], ALiBi: times the distance of the key, which is at most 0
    )
    sinks: Tensor | None = None  # [heads]: the score of one more key, which has no value


class AttentionBackend(Protocol):
    @property
    def name(self) -> str:
        """One of `BACKENDS`."""
        ...

    def attend(self, layout: RowLayout, store: Tensor, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend over the pages in `store`, one block of the KV cache, which holds the step's own rows already.

        `query`: [T, heads, D]; the result has the same rows and heads.
        """
        ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose decode steps run in static buffers, so that a CUDA graph can replay them.

    Nothing branches on the host inside. The three methods are those of mini-sglang's backends.
    """

    def init_graphs(self, rows: int, positions: int) -> None:
        """Allocate static buffers for steps of at most `rows` sequences of at most `positions` positions."""
        ...

    def prepare_for_capture(self, rows: int) -> RowLayout:
        """Return the static layout of decode steps of this many sequences; all of them are padding now."""
        ...

    def prepare_for_replay(self, layout: StepLayout, rows: int) -> None:
        """Copy a decode step of at most `rows` sequences into the static layout of `rows`; the rest is padding."""
        ...
