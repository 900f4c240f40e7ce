"""The settings of the gateway core: deadlines, pauses and limits.

Built from the flags by `app.py` and read by every part of the core. Knows nothing of flags.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Times in seconds, counts in the unit of their name."""

    # Longest time a session is held for servers or room, unless its servers announce a limit.
    hold_limit_seconds: float = 60.0
    # Silence of a server on a running route that is never suspicious.
    suspect_after_seconds: float = 0.3
    # Added to the expected step times of the route: a token is overdue after that.
    token_timeout_seconds: float = 1.0
    # Added to the longest step of a server: its FenceAck is overdue after that.
    fence_ack_seconds: float = 0.3
    # Time to wait for a FenceAck if no route avoids that server.
    fence_timeout_seconds: float = 5.0
    # Silence after which a link is closed; three idle heartbeats.
    disconnect_after_seconds: float = 15.0
    # Lease of the servers (R19, leases). After a stall of half of it, all hops are fenced anew.
    lease_seconds: float = 30.0
    # First pause of a held session; it doubles up to retry_limit_seconds.
    retry_seconds: float = 0.1
    # Longest pause of a held session.
    retry_limit_seconds: float = 2.0
    # A link between two servers is avoided for this time after two failures within it.
    link_failure_seconds: float = 30.0
    # A session is held after this many attempts without a new token (R12, admission).
    attempts_without_token: int = 10
    # A held session frees its KV on all servers after this many tries (R12, admission).
    release_kv_after: int = 3
    # Most migrations that involve a server at a time (R13, migration).
    copies_per_server: int = 8
    # A copy that makes no progress for this time is aborted.
    copy_stall_seconds: float = 5.0
    # After this many failed copies a session migrates without one.
    copy_attempts: int = 3
    # A server with too many sessions for this time gives some away; 0: off.
    rebalance_after_seconds: float = 60.0
    # First pause after a failed migration; it doubles with each.
    migration_retry_seconds: float = 0.5
    # Longest predicted wait of a new turn for a server that others can replace.
    affinity_seconds: float = 2.0
    # Time another gateway with a lower epoch has to relinquish a session.
    contest_seconds: float = 0.4
    # Time all servers have to tell what they hold of a session (R20, takeover).
    search_seconds: float = 0.3
    # Longest wait for a link to a server that may know another owner of the session (R19, leases).
    relink_seconds: float = 3.0
    # Time for a complete log copy to arrive.
    log_fetch_seconds: float = 10.0
    # Most log entries per Input message.
    max_input_tokens: int = 8192
    # Largest Input sent on the live lane: up to here cheaper than waking the bulk lane.
    max_live_input_tokens: int = 256
