"""Planted bugs by which one session harms others (I7, isolation).

As in `protocol.py`: subclasses of product classes, one rule broken in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from typing_extensions import override

from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape, Result


class FailsAllHops(ServerCore):
    """I7 (isolation): when a step raises, all its hops fail; none is run again alone."""

    @override
    def fail_step(self, error: str, now: float, *, is_full: bool = False) -> None:
        self.finish_step([Result(error=error)] * self._steps._task_count, now)


class GrantsFullWindows(ServerCore):
    """R11 (windows): each hop grants its whole window, whatever all hops expect from one peer."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(replace(settings, in_flight_bytes=1 << 60), shape, draw)
