"""The operator's settings for all swarms: image, grace periods, limits, back-off.

Made by `settings` from flags (tests make their own), read by all pure code. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Policy:
    server_image: str
    image_pull_policy: str = "IfNotPresent"
    gateway_url: str = ""
    pod_template: Mapping[str, Any] = field(default_factory=dict)
    """A patch over every server pod of the cluster, applied before the pool's own."""

    not_ready_grace: float = 5.0
    """A NotReady node's pods are replaced after this, counted from what the node controller reports."""
    unknown_node_grace: float = 30.0
    """A pod may be seen before its new node; after this, the node counts as deleted."""

    mass_outage_fraction: float = 0.5
    """If more than this share of the nodes became NotReady, it is a mass outage and no pod is replaced."""
    mass_outage_count: int = 3
    """Fewer NotReady nodes than this are never a mass outage."""
    mass_outage_timeout: float = 600.0
    """A mass outage is taken for a fault of the control plane for this long, then pods are replaced."""

    backoff_base: float = 2.0
    """Wait before the replacement after a slot's second failure; doubled for each further one, 0 after the first."""
    backoff_limit: float = 300.0
    """Longest wait before a replacement."""
    stable_after: float = 600.0
    """A server that has run this long clears the failures of its slot."""
    budget_per_slot: int = 3
    """Failures per slot, summed over all slots, that are replaced quickly; beyond, each waits `backoff_limit`."""
    min_budget: int = 10
    """Lower bound of that sum for small swarms."""
    max_restarts: int = 6
    """A pod whose container is not ready and was restarted this often (5 minutes of kubelet back-off) is replaced."""
    long_run: float = 3600.0
    """A container that ran this long is restarted in its pod: its restarts of the months before say nothing."""
    slow_start: float = 600.0
    """A server that is not ready after this, without a reason, is reported."""
    unready_grace: float = 30.0
    """An old server that misses its probes for less than this may serve again, so a rollout does not delete it."""
    pool_timeout: float = 600.0
    """A pod without a node for this long is created again for another pool."""
    stuck_after: float = 60.0
    """A pod that outlives its grace period by this much is reported as stuck."""
