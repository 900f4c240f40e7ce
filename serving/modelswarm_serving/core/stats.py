"""What a server counts of itself: for its metrics and its log, never for a decision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelswarm.protocol.messages import FaultKind


@dataclass(frozen=True, slots=True)
class ServerStats:
    sessions: int
    running: int  # of those, with a Go
    ready: int  # of those, with rows or parts of copies that wait for a step
    free_pages: int
    total_pages: int
    steps: int
    rows: int
    step_seconds: float  # running mean
    filled_pages: int  # given to sessions, and KV lies in them
    recovery_pages: int  # that only repairs may take
    oldest_ready_seconds: float  # how long the rows that wait longest have waited
    servers: int  # linked
    gateways: int  # linked
    reports: Mapping[FaultKind, int]  # to gateways, of what was wrong with an epoch
    draining: bool
    replay_bytes: int  # of kept rows ...
    replay_limit: int  # ... and how many there may be
    replay_evictions: int  # sessions whose kept rows went because memory was short
