"""The variant of a model: servers of one variant hold the same weights and exchange the same rows.

Two revisions, dtypes or depths of a model may be connected at once, during an upgrade or by mistake. A turn runs on one
variant from beginning to end: rows of another variant are other numbers, or no rows at all. A model with an adapter is
a model of its own here, with its own name and the servers that have the adapter. Pure; used by `server_registry.py`,
and by the node to reject invalid Hellos. Knows no servers.
"""

from __future__ import annotations

from typing import NamedTuple

from modelswarm.checkpoint.tensor_names import MAX_BLOCKS
from modelswarm.protocol.identity import Adapter
from modelswarm.protocol.messages import Hello


class ModelVariant(NamedTuple):
    revision: str
    n_blocks: int
    dtype: str
    row_bytes: int
    adapter: Adapter | None = None


def variant_of(hello: Hello) -> ModelVariant:
    """Return the variant of the model without adapters."""
    return ModelVariant(hello.revision, hello.n_blocks, hello.dtype, hello.row_bytes)


def variants_of(hello: Hello) -> dict[str, ModelVariant]:
    """Return all that a server serves: by the name of the model, and by that of each of its adapters."""
    plain = variant_of(hello)
    named = {adapter.name: plain._replace(adapter=adapter) for adapter in hello.adapters}
    return {**named, hello.model: plain}


def serves(hello: Hello, model: str) -> bool:
    """Return whether the name is that of the server's model, or of one of its adapters."""
    return model == hello.model or any(model == adapter.name for adapter in hello.adapters)


def is_valid(hello: Hello) -> bool:
    """True if the declared span, depth and length fit together, so that routes can use the server."""
    has_span = 0 <= hello.first < hello.last <= hello.n_blocks <= MAX_BLOCKS
    return has_span and hello.max_length > 0
