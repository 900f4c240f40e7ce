"""The settings of the gateway core: deadlines, pauses and limits.

Built from the flags by `app.py` and read by every part of the core. Knows nothing of flags.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    hold_limit_seconds: float = 60.0  # a session that cannot run waits so long for servers or room
    suspect_after_seconds: float = (
        0.3  # silence of a server on a live route that is never suspicious
    )
    token_timeout_seconds: float = 1.0  # ... and what its servers' steps take: a token is due
    fence_ack_seconds: float = 0.3  # ... and its longest step: a hop's answer to a Fence is due
    fence_timeout_seconds: float = 5.0  # it is waited for so long if there is no way around it
    disconnect_after_seconds: float = (
        15.0  # silence of any server, three idle beats: its link is closed
    )
    lease_seconds: float = 30.0  # the servers' (R19): half of it asleep, and all is fenced anew
    retry_seconds: float = 0.1  # first pause of a held session; doubles up to retry_limit_seconds
    retry_limit_seconds: float = 2.0
    link_failure_seconds: float = (
        30.0  # a pair of servers that failed twice in it is avoided for as long
    )
    attempts_without_token: int = 10  # this many loops without a new token (R21): held
    release_kv_after: int = 3  # a held session frees its KV elsewhere after so many tries (R12)
    copies_per_server: int = 8  # planned moves that a server has a part in at a time (R13)
    copy_stall_seconds: float = 5.0  # a copy that gets no nearer for so long is dropped
    copy_attempts: int = 3  # after so many failed copies, a session is moved without one
    rebalance_after_seconds: float = 60.0  # a server with too many sessions gives some away; 0: off
    migration_retry_seconds: float = 0.5  # pause after a failed move; doubles with each
    affinity_seconds: float = 2.0  # a new turn waits no longer for a server that others can replace
    contest_seconds: float = 0.4  # for another gateway with a lower epoch to let go of a session
    search_seconds: float = 0.3  # to hear from all servers what they hold of a session (R20)
    log_fetch_seconds: float = 10.0  # for a log copy to come whole
    max_input_tokens: int = 8192  # most log entries per Input message
    max_live_input_tokens: int = (
        256  # up to here an Input goes on live: cheaper than waking the bulk lane
    )
