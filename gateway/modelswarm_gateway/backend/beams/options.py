"""Options of a beam search, with the names and defaults of transformers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

EarlyStopping: TypeAlias = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class BeamOptions:
    num_beams: int  # continuations that are kept at each step
    length_penalty: float = (
        1.0  # the score is divided by the length to this power: above 0 for long answers
    )
    early_stopping: EarlyStopping = False
    """True: ends when `num_beams` answers are finished; False: when a better one is unlikely; "never": impossible."""
