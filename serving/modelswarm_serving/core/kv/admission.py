"""Admission control of turns: gives a hop the pages that a turn needs, or a reason for refusal (R12, admission).

Used by `fencing.py` for new hops and for next turns. Knows nothing of epochs or of what pages hold.
"""

from __future__ import annotations

import math

from modelswarm.protocol.messages import Create, Refusal, Turn
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.kv.page_allocator import PageAllocator, pages_needed
from modelswarm_serving.model.base import ModelShape

HopKey = tuple[str, int, int]
"""Session, first and last block of a hop."""

RESERVATION_SECONDS = 3.0
"""Pages that become free within this time are reserved for a recovery that found no room."""

MEMORY_PAUSE_SECONDS = 10.0
"""Pause of admissions after a step that found its device full; running sessions may end or shrink meanwhile."""


class Admission:
    def __init__(self, shape: ModelShape, recovery_fraction: float) -> None:
        self._shape = shape
        self._recovery_pages = math.ceil(recovery_fraction * shape.total_pages)
        self.pages = PageAllocator(shape.total_pages)
        self._reservations: dict[HopKey, tuple[int, float]] = {}  # recovery -> missing pages, end
        self._paused_until = -math.inf

    def pause(self, now: float) -> None:
        """Admit no new work for a while; recoveries are still admitted, because their streams have begun."""
        self._paused_until = now + MEMORY_PAUSE_SECONDS

    def is_paused(self, now: float) -> bool:
        """True while no new work is admitted. A turn that needs no more pages than its hop has is none."""
        return now < self._paused_until

    def needs_pages(self, turn: Turn, held_pages: int) -> bool:
        return self._pages_of_turn(turn) > held_pages

    def refusal_when_empty(self, turn: Turn, for_recovery: bool) -> Refusal | None:
        """Return the refusal of a turn that this server could not serve even if it were empty; else None."""
        most = self.pages.total - (0 if for_recovery else self._recovery_pages)
        if (
            turn.reserved_positions > self._shape.max_length
            or turn.end - 1 > turn.reserved_positions
        ):
            return Refusal.TOO_LONG
        return Refusal.TOO_LONG if self._pages_of_turn(turn) > most else None

    @property
    def recovery_pages(self) -> int:
        """Pages that only recoveries may take."""
        return self._recovery_pages

    def filled_pages(self, hop: Hop) -> int:
        """Count the pages of `hop` that hold KV."""
        return min(len(hop.pages), pages_needed(hop.kv, self._shape.page_size))

    @property
    def max_session_length(self) -> int:
        """Most positions that a new session can reserve here: limited by the context or by the pages."""
        pages = self.pages.total - self._recovery_pages
        return min(self._shape.max_length, pages * self._shape.page_size)

    def has_wrong_blocks(self, create: Create) -> bool:
        return not self._shape.first <= create.first < create.last <= self._shape.last

    def missing_pages(self, turn: Turn, held_pages: int, for_recovery: bool) -> int:
        """Count the pages that must become free before `turn` fits; <= 0 when it fits."""
        reserved = 0 if for_recovery else self._recovery_pages
        wanted = self._pages_of_turn(turn) - held_pages
        return wanted + reserved - self.pages.free if wanted > 0 else 0

    def reserve_for_recovery(self, key: HopKey, turn: Turn, held: int, now: float) -> None:
        """Reserve pages for a recovery that found no room, so that small new sessions do not take what becomes free."""
        self._drop_expired(now)
        self._reservations[key] = (self._pages_of_turn(turn) - held, now + RESERVATION_SECONDS)

    def cancel_reservation(self, key: HopKey) -> None:
        """The recovery of `key` got its pages; other reservations stay."""
        self._reservations.pop(key, None)

    def conflicts_with_recovery(self, session: str, turn: Turn, held: int, now: float) -> bool:
        """True if a turn of `session` would take pages reserved for the recovery of another session.

        The largest reservation counts: it is the one that smaller turns could keep out.
        """
        wanted = self._pages_of_turn(turn) - held
        if wanted <= 0 or not self._reservations:
            return False
        self._drop_expired(now)
        awaited = [pages for who, (pages, _) in self._reservations.items() if who[0] != session]
        return self.pages.free - wanted < max(awaited, default=0)

    def _drop_expired(self, now: float) -> None:
        self._reservations = {
            who: each for who, each in self._reservations.items() if now < each[1]
        }

    def resize_hop(self, hop: Hop, turn: Turn) -> None:
        """Give `hop` the pages of `turn`, which must fit; a page with valid KV is never taken away."""
        wanted = max(self._pages_of_turn(turn), pages_needed(hop.kv, self._shape.page_size))
        if wanted > len(hop.pages):
            hop.pages.extend(self.pages.allocate(wanted - len(hop.pages)))
        else:
            self.pages.release(hop.pages[wanted:])
            del hop.pages[wanted:]
        hop.turn = turn

    def release_hop(self, hop: Hop) -> None:
        self.pages.release(hop.pages)
        hop.pages = []

    def _pages_of_turn(self, turn: Turn) -> int:
        """At least one, so that the pages bound the number of hops."""
        return max(1, pages_needed(turn.reserved_positions, self._shape.page_size))
