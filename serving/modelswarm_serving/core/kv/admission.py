"""May a hop have the pages that a turn wants (R12)? Gives them, or says why not.

Used by `server.py` for creates and for next turns. Knows nothing of epochs or of what pages hold.
"""

from __future__ import annotations

import math

from modelswarm.protocol.messages import Create, Refusal, Turn
from modelswarm_serving.core.hops.hop import Hop
from modelswarm_serving.core.kv.page_allocator import PagePool, pages_for
from modelswarm_serving.model.base import ModelShape

Range = tuple[str, int, int]  # a session and blocks of it

REPAIR_SECONDS = 3.0  # what becomes free so soon after is for a repair that found no room


class Admission:
    def __init__(self, shape: ModelShape, repair_fraction: float) -> None:
        self._shape = shape
        self._kept = math.ceil(repair_fraction * shape.total_pages)
        self.pool = PagePool(shape.total_pages)
        self._awaited: dict[Range, tuple[int, float]] = {}  # of repairs: more pages, until when

    def never(self, turn: Turn, repair: bool) -> Refusal | None:
        """A turn that this server could not serve even if it were empty."""
        most = self.pool.total - (0 if repair else self._kept)
        if turn.reserve > self._shape.max_length or turn.end - 1 > turn.reserve:
            return Refusal.TOO_LONG
        return Refusal.TOO_LONG if self._pages(turn) > most else None

    @property
    def kept(self) -> int:
        """Pages that only repairs may take."""
        return self._kept

    def filled(self, hop: Hop) -> int:
        """Of the pages that `hop` was given, those in which KV lies."""
        return min(len(hop.pages), pages_for(hop.kv, self._shape.page_size))

    @property
    def longest(self) -> int:
        """The longest log that a new session can ever have here: the context, or what the pages hold of it."""
        return min(
            self._shape.max_length, (self.pool.total - self._kept) * self._shape.page_size + 1
        )

    def wrong_blocks(self, create: Create) -> bool:
        return not self._shape.first <= create.first < create.last <= self._shape.last

    def missing(self, turn: Turn, held: int, repair: bool) -> int:
        """How many pages would have to become free before `turn` fits; <= 0 when it does."""
        kept = 0 if repair else self._kept
        wanted = self._pages(turn) - held
        return wanted + kept - self.pool.free if wanted > 0 else 0

    def repair_waits(self, who: Range, turn: Turn, held: int, now: float) -> None:
        """A repair found no room. Many small new sessions must not take what becomes free before it fits."""
        self._expire(now)
        self._awaited[who] = (self._pages(turn) - held, now + REPAIR_SECONDS)

    def repair_has_room(self, who: Range) -> None:
        """Others may still wait."""
        self._awaited.pop(who, None)

    def outranked(self, session: str, turn: Turn, held: int, now: float) -> bool:
        """Whether `session`, which is not repaired here, would take pages that the repair of another waits for. The
        largest of them counts: it is the one that others could keep out."""
        wanted = self._pages(turn) - held
        if wanted <= 0 or not self._awaited:
            return False
        self._expire(now)
        awaited = [pages for who, (pages, _) in self._awaited.items() if who[0] != session]
        return self.pool.free - wanted < max(awaited, default=0)

    def _expire(self, now: float) -> None:
        self._awaited = {who: each for who, each in self._awaited.items() if now < each[1]}

    def resize(self, hop: Hop, turn: Turn) -> None:
        """Give `hop` the pages of `turn`, which fits; never takes a page that valid KV lies in."""
        wanted = max(self._pages(turn), pages_for(hop.kv, self._shape.page_size))
        if wanted > len(hop.pages):
            hop.pages.extend(self.pool.take(wanted - len(hop.pages)))
        else:
            self.pool.give(hop.pages[wanted:])
            del hop.pages[wanted:]
        hop.turn = turn

    def release(self, hop: Hop) -> None:
        self.pool.give(hop.pages)
        hop.pages = []

    def _pages(self, turn: Turn) -> int:
        """At least one, so that the pages bound the number of hops."""
        return max(1, pages_for(turn.reserve, self._shape.page_size))
