"""Compare the timeouts a server declares in its Hello with those of this gateway.

Used by the node when a link comes up, to log a conflict. The flags of one process are checked in `settings.py`.
Knows neither links nor sessions.
"""

from __future__ import annotations

from modelswarm.protocol.messages import Hello
from modelswarm_gateway.core.detection.failure_detector import min_timeout


def heartbeat_fault(suspect_after: float, hello: Hello) -> str | None:
    """Return a log line if the server's heartbeats are too rare for `--suspect-after`; else None."""
    timeout = min_timeout(suspect_after, hello.heartbeat_ms / 1000)
    if timeout == suspect_after:
        return None
    return (
        f"{hello.peer} was started with --heartbeat {hello.heartbeat_ms / 1000:g}, "
        f"this process with --suspect-after {suspect_after:g}, less than two heartbeats: "
        f"the server is suspected after {timeout:g} s of silence; lower --heartbeat, or raise --suspect-after"
    )


def hold_fault(fence_timeout: float, hello: Hello) -> str | None:
    """Return a log line if sessions on the server would end while they are fenced; else None."""
    if not 0 < hello.hold_ms / 1000 < fence_timeout:
        return None
    return (
        f"{hello.peer} was started with --hold-limit {hello.hold_ms / 1000:g}, "
        f"this process with --fence-timeout {fence_timeout:g}: sessions of {hello.model} wait no longer than the hold "
        "limit; lower --fence-timeout, or raise --hold-limit (sessions.holdLimit)"
    )
