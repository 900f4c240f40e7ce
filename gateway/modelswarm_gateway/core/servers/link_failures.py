"""Pairs of living servers that keep losing the link between them (R5).

Kept by `server_registry.py`; repairs and moves plan around the bad ones. A pair is forgotten after a while without failures.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId

MIN_FAILURES = 2  # failures, as seen from one end


@dataclass(slots=True)
class _Failures:
    seen: set[tuple[PeerId, int]] = field(default_factory=set)  # reporter, generation of its link
    last_at: float = 0.0


class LinkFailures:
    def __init__(self, seconds: float) -> None:
        """`seconds` after its last failure a pair is as good as any."""
        self._seconds = seconds
        self._failures: dict[frozenset[PeerId], _Failures] = {}

    def record_failure(self, reporter: PeerId, peer: PeerId, generation: int, now: float) -> None:
        """A link broke or swallowed something; each generation of it counts once."""
        pair = self._failures.setdefault(frozenset((reporter, peer)), _Failures(last_at=now))
        if now - pair.last_at > self._seconds:
            pair.seen.clear()
        pair.last_at = now
        pair.seen.add((reporter, generation))

    def unreliable(self, now: float) -> dict[frozenset[PeerId], int]:
        """Those to avoid, with how often each failed as seen from one end."""
        for names, pair in list(self._failures.items()):
            if now - pair.last_at > self._seconds:
                del self._failures[names]
        failures = {
            names: max(Counter(reporter for reporter, _ in pair.seen).values())
            for names, pair in self._failures.items()
        }
        return {names: count for names, count in failures.items() if count >= MIN_FAILURES}
