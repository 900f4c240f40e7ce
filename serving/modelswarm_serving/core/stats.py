"""Statistics of the server core, for metrics and logs; no decision uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from modelswarm.protocol.messages import FaultKind


@dataclass(frozen=True, slots=True)
class ServerStats:
    sessions: int
    running: int  # sessions with a started epoch
    ready: int  # sessions with rows or KV transfers that wait for a step
    free_pages: int
    total_pages: int
    steps: int
    rows: int
    filled_pages: int  # given to sessions, and holding KV
    recovery_pages: int  # reserved for recoveries
    oldest_ready_seconds: float  # wait of the rows that wait longest
    servers: int  # linked
    gateways: int  # linked
    reports: Mapping[FaultKind, int]  # fault reports sent to gateways, by kind
    draining: bool
    replay_bytes: int  # held by the replay log
    replay_limit: int  # most bytes of the replay log
    replay_evictions: int  # sessions whose rows the replay log dropped for want of memory
