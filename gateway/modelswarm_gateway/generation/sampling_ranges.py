"""Allowed values of the sampling fields: one table for both APIs, for their checks and their sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from modelswarm.protocol.sampling import (
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
)

MAX_BAD_STRINGS = 256
"""Each is forbidden with and without a blank before it."""
MAX_BAD_SEQUENCES = 512  # of token ids


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
    "typical_p": Range("a number above 0, at most 1", 0, 1, is_above_low=True),
    "presence_penalty": Range("a number from -2 to 2", -2, 2),
    "frequency_penalty": Range("a number from -2 to 2", -2, 2),
    "no_repeat_ngram_size": Range("a whole number from 0 (0: off)", 0),
    "min_tokens": Range("a whole number from 0", 0),
    "seed": Range("a whole number from -2^63 to 2^64 - 1", -(1 << 63), (1 << 64) - 1),
}

MAX_BIAS = 100
MAX_STOP_TOKENS = 1024
MAX_BAD_WORD_LENGTH = 200  # characters
_TOKEN_IDS = "token ids (whole numbers from 0)"
LIST_WORDS = {
    "logit_bias": f"an object of at most {MAX_LOGIT_BIAS} token ids, each with a number from -{MAX_BIAS} to {MAX_BIAS}",
    "bad_words": f"a list of at most {MAX_BAD_STRINGS} strings of 1 to {MAX_BAD_WORD_LENGTH} characters",
    "bad_words_ids": f"a list of at most {MAX_BAD_SEQUENCES} lists of 1 to {MAX_BAD_WORD_TOKENS} {_TOKEN_IDS}",
    "stop_token_ids": f"a list of at most {MAX_STOP_TOKENS} {_TOKEN_IDS}",
    "allowed_token_ids": f"a list of 1 to {MAX_ALLOWED_TOKENS} {_TOKEN_IDS}",
}
