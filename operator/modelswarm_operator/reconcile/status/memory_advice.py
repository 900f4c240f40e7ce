"""Advice for servers that were killed for their memory: the field to change, and its value.

Used by `pod_diagnosis`. Where KV takes what the limit leaves, a higher limit alone does not help, because KV takes
that too. Then the number of sessions is to be set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from modelswarm.placement.plan import full_sessions
from modelswarm.placement.quantity import bytes_of
from modelswarm.resources.spec import Spec
from modelswarm.resources.status import PlannedSpan

_STEP = 64 << 20
"""Suggested limits are a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class MemoryAdvice:
    """Sentences about memory, from the limits by pool, the sessions that fit and those that the document asks for."""

    limits: Mapping[str, str] = field(default_factory=dict)
    concurrent: int | None = None
    planned: int = 0  # sessions of full length, on the server with the fewest
    max_length: int = 0

    @classmethod
    def for_plan(cls, spec: Spec, spans: Sequence[PlannedSpan], max_length: int) -> MemoryAdvice:
        limits = {
            pool.name: str(pool.resources.limits["memory"])
            for pool in spec.pools
            if "memory" in pool.resources.limits
        }
        planned = min(full_sessions(span.pages, max_length) for span in spans)
        return cls(limits, spec.sessions.concurrent, planned, max_length)

    def explain_kill(self, pool: str) -> str:
        """Return how much was used and what to change, after `Pod x was killed for using more than`."""
        limit = self.limits.get(pool)
        if limit is None:
            return (
                f"the memory of its node. Set resources.limits.memory of pool {pool or 'default'}, so that only nodes "
                f"with that much are chosen{self._fewer_sessions(', or ')}."
            )
        return f"its memory limit of {limit}. {self._cure(pool, limit)}"

    def _cure(self, pool: str, limit: str) -> str:
        higher = _raised(limit)
        raised = f"resources.limits.memory of pool {pool} from {limit} to {higher}"
        if self.concurrent is not None:
            return f"Raise {raised}{self._fewer_sessions(', or ')}."
        if self.planned > 1:
            return (
                f"KV takes what the limit leaves, so a higher limit alone does not help: set spec.sessions.concurrent "
                f"to {self._fewer()} (it has room for {self.planned}), or to {self.planned} and raise {raised}."
            )
        return (
            f"KV takes what the limit leaves, so a higher limit alone does not help: set spec.sessions.concurrent to 1 "
            f"and raise {raised}, or lower spec.sessions.maxLength from {self.max_length}."
        )

    def _fewer_sessions(self, before: str) -> str:
        if self.concurrent is not None and self.concurrent > 1:
            return (
                f"{before}lower spec.sessions.concurrent from {self.concurrent} to {self._fewer()}"
            )
        return ""

    def _fewer(self) -> int:
        return max(1, (self.concurrent or self.planned) * 3 // 4)


def _raised(limit: str) -> str:
    """Return a quarter more, as a quantity."""
    size = bytes_of(limit, "resources.limits.memory")
    return f"{-(-size * 5 // 4 // _STEP) * (_STEP >> 20)}Mi"
