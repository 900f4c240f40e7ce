"""Bugs on purpose by which sessions suffer for others (I7).

As in `protocol.py`, which has the others: subclasses of the real cores, one rule broken in each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.model.base import ModelShape, Result


class FailsTogether(ServerCore):
    """I7: when a step raises, everybody in it has failed; nobody is tried again alone."""

    def fail_step(self, error: str, now: float) -> None:
        self.finish_step([Result(error=error)] * self._steps._task_count, now)


class LetsAllCome(ServerCore):
    """R12: each hop grants its window, however much all of them have coming from one peer."""

    def __init__(
        self, settings: ServerSettings, shape: ModelShape, draw: Callable[[], int]
    ) -> None:
        super().__init__(replace(settings, in_flight_bytes=1 << 60), shape, draw)
