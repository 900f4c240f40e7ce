"""Sizes of the rows of logits and hidden states that servers return, by their Hello. Knows no servers."""

from __future__ import annotations

from typing import NamedTuple

from modelswarm.protocol.messages import Hello

# Bytes of one number. Rows of another dtype, or of none, are returned as raw bytes.
_NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
RAW = "uint8"
# The first version of a link whose server runs sessions of a range of blocks.
RANGES_SINCE = (2, 2)
# The first one whose server adds rows inside of its blocks (R14, opaque rows).
BLOCK_ROWS_SINCE = (2, 4)


class RowSizes(NamedTuple):
    """Bytes of one returned row; 0: the servers return none."""

    logit_bytes: int = 0
    hidden_bytes: int = 0
    dtype: str = RAW

    @staticmethod
    def of(hello: Hello) -> RowSizes:
        dtype = hello.dtype if hello.dtype in _NUMBER_BYTES else RAW
        return RowSizes(hello.logit_bytes, hello.hidden_bytes, dtype)

    @staticmethod
    def at_boundary(hello: Hello) -> RowSizes:
        """Return the size of a row between blocks; NO_ROWS for a server that runs no range of blocks."""
        if hello.version < RANGES_SINCE:
            return NO_ROWS
        return RowSizes(0, hello.row_bytes, RowSizes.of(hello).dtype)

    @property
    def number_bytes(self) -> int:
        return _NUMBER_BYTES.get(self.dtype, 1)


NO_ROWS = RowSizes()
