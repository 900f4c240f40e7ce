"""Allowed values of the sampling fields: one table for both APIs, for their checks and their sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a number."""

    words: str  # for errors: "must be ..."
    low: int
    high: int | None = None  # None: no limit
    is_above_low: bool = False  # True: `low` itself is not allowed

    def __contains__(self, value: float) -> bool:
        """Return whether the value is allowed; nan never is."""
        is_low_enough = self.high is None or value <= self.high
        return is_low_enough and (value > self.low if self.is_above_low else value >= self.low)

    def pydantic_limits(self) -> dict[str, Any]:
        """Return the arguments of pydantic's `Field`."""
        return {"gt" if self.is_above_low else "ge": self.low, "le": self.high}


RANGES = {
    "max_tokens": Range("a whole number from 0", 0),
    "temperature": Range("a number from 0 to 2", 0, 2),
    "top_p": Range("a number above 0, at most 1", 0, 1, is_above_low=True),
    "top_k": Range("a whole number from -1 (0 and -1: off)", -1),
    "min_p": Range("a number from 0 to 1", 0, 1),
    "repetition_penalty": Range("a number above 0, at most 10", 0, 10, is_above_low=True),
    "seed": Range("a whole number from -2^63 to 2^64 - 1", -(1 << 63), (1 << 64) - 1),
}
