"""Compares the memory that a server will take with the limit of its container, before it allocates any of it.

Called by `app.py` once torch is imported and nothing is loaded. Without it a server that does not fit is killed by the
kernel, with no word about the reason. Knows no model.
"""

from __future__ import annotations

import logging

from modelswarm.errors import MemoryLimitError
from modelswarm.placement.memory import MemoryModel
from modelswarm.placement.plan import full_sessions, pages_for_sessions
from modelswarm.placement.quantity import human_bytes, limit_at_least
from modelswarm_serving.model.base import ModelShape

log = logging.getLogger(__name__)


def check_memory_limit(memory: MemoryModel, shape: ModelShape, limit: int | None) -> None:
    """Raise MemoryLimitError if a server of this shape needs more than `limit` bytes; None: there is no limit."""
    needs = memory.with_pages(shape.total_pages)
    bound = "no memory limit" if limit is None else f"a memory limit of {human_bytes(limit)}"
    if limit is None or needs.total <= limit:
        log.info("memory: %s of %s: %s", human_bytes(needs.total), bound, needs)
        return
    raise MemoryLimitError(
        f"the server of blocks {shape.first}:{shape.last} needs {human_bytes(needs.total)} ({needs}), but its "
        f"container has {bound}; {_cure(memory, shape, limit)}"
    )


def _cure(memory: MemoryModel, shape: ModelShape, limit: int) -> str:
    """Return the fields to change and their values. A limit alone does not help where KV takes what it leaves."""
    length, size = shape.max_length, shape.page_size
    fitting = full_sessions(memory.most_pages(limit), length, size)
    wanted = max(1, full_sessions(shape.total_pages, length, size))
    pages = max(shape.total_pages, pages_for_sessions(wanted, length, size))
    least = limit_at_least(memory.needed(pages))
    raised = (
        f"spec.sessions.concurrent to {wanted} and resources.limits.memory of its pool to {least}"
    )
    if not fitting:
        return f"set {raised}"
    fewer = f"set spec.sessions.concurrent to {fitting}"
    return fewer if fitting >= wanted else f"{fewer}, or {raised}"
