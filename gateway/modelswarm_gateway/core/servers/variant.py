"""The variant of a model: servers of one variant hold the same weights and exchange the same rows.

Two revisions, dtypes or depths of a model may be connected at once, during an upgrade or by mistake. A turn runs on one
variant from beginning to end: rows of another variant are other numbers, or no rows at all. Pure; used by
`server_registry.py`, and by the node to reject invalid Hellos. Knows no servers.
"""

from __future__ import annotations

from typing import NamedTuple

from modelswarm.checkpoint.tensor_names import MAX_BLOCKS
from modelswarm.protocol.messages import Hello


class ModelVariant(NamedTuple):
    revision: str
    n_blocks: int
    dtype: str
    row_bytes: int


def variant_of(hello: Hello) -> ModelVariant:
    return ModelVariant(hello.revision, hello.n_blocks, hello.dtype, hello.row_bytes)


def is_valid(hello: Hello) -> bool:
    """True if the declared span, depth and length fit together, so that routes can use the server."""
    has_span = 0 <= hello.first < hello.last <= hello.n_blocks <= MAX_BLOCKS
    return has_span and hello.max_length > 0
