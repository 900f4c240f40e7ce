"""How well each server does, against others like it: one score, and whether it is ejected.

Pure. Used by `fleet.py`, whose `standing` the routing asks for; knows nothing of sessions or routes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    score: float = 1.0  # in (0, 1]; costs are divided by it
    ejected: bool = False  # left out of new routes while others hold its blocks


WELL = Standing()
