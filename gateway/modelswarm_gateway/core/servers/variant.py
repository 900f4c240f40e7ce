"""Which servers of a model may stand in one route: those that hold the same weights and exchange the same rows.

Two revisions, dtypes or depths of a model may be linked at once, in the middle of an upgrade or by mistake. A session
runs on one kind of them for as long as a turn lasts: rows of another kind are other numbers, or no rows at all. Pure;
used by `server_registry.py`, and by the node to see which greetings make sense.
"""

from __future__ import annotations

from typing import NamedTuple

from modelswarm.protocol.messages import Hello

MAX_BLOCKS = 4096


class ModelVariant(NamedTuple):
    revision: str
    n_blocks: int
    dtype: str
    row_bytes: int


def variant_of(hello: Hello) -> ModelVariant:
    return ModelVariant(hello.revision, hello.n_blocks, hello.dtype, hello.row_bytes)


def is_valid(hello: Hello) -> bool:
    """Whether a server that says this of itself can be planned with."""
    spans = 0 <= hello.first < hello.last <= hello.n_blocks <= MAX_BLOCKS
    return spans and hello.max_length > 0
