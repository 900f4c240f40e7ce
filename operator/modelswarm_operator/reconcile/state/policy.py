"""What the operator is told at its start about how to treat swarms: images, graces, fractions, budgets.

Made by `settings` from flags (tests make their own); read by everything pure. Seconds everywhere.
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

    not_ready_grace: float = 5.0  # a node's own blip, on top of what the node controller waits
    unknown_node_grace: float = 30.0  # a pod may be seen before its new node is
    mass_outage_fraction: float = 0.5  # more than this share of nodes NotReady ...
    mass_outage_count: int = (
        3  # ... and at least so many: a blip of the control plane, nobody is replaced
    )
    mass_outage_timeout: float = 600.0  # ... for so long: then it is no blip

    backoff_base: float = 2.0  # after the second failure of a slot; the first is replaced at once
    backoff_limit: float = 300.0
    stable_after: float = 600.0  # a server that ran so long has its slot's failures forgotten
    budget_per_slot: int = 3  # failures, all slots together ...
    min_budget: int = 10  # ... but never fewer than this; then everything waits `backoff_limit`
    max_restarts: int = 6  # of a container that is not ready: 5 minutes of backoff
    slow_start: float = 600.0  # a server that is not ready for so long and gives no reason is told
    pool_timeout: float = 600.0  # a pod without a node for so long is made anew for another pool
    stuck_after: float = 60.0  # a pod that outlives its grace period by this much is stuck
