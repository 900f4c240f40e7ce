"""Ownership of a hop when a gateway fences one that belongs to another gateway (R19: leases, R20: ownership).

Pure; used by `fencing.py` for every Fence. The lease protects a running gateway. Gateways that claim one session are
ordered by rank. The epoch that ran last, as far as each knows, is compared first, then their own epoch.
"""

from __future__ import annotations

import enum

from modelswarm.protocol.identity import NO_EPOCH, PeerId
from modelswarm.protocol.messages import Fence
from modelswarm_serving.core.hops.hop import Hop


class Ownership(enum.Enum):
    OWNER = "owner"  # the owner itself fences
    TAKEN_OVER = "taken_over"  # the other gateway owns it from now on, with its KV and log
    REPLACED = "replaced"  # it is freed, and the Fence creates a new hop
    STALE_EPOCH = "stale_epoch"  # the Fence is refused


def decide_ownership(
    hop: Hop, peer: PeerId, fence: Fence, has_lease: bool, is_linked: bool
) -> Ownership:
    """Decide a Fence of `peer`; `has_lease` and `is_linked` are about the hop's owner.

    While its lease runs, the owner keeps every hop that it has started. Without a link it does not if an epoch ran
    since: then the hop is a leftover. A hop that it never started goes to the higher rank, so that one of two
    simultaneous takeovers gets all hops. An owner that returns after its lease has expired competes by rank as well,
    until its StartEpoch. An owner with an expired lease keeps no hop.
    The new owner gets KV and log only if nothing ran here since the epoch that it found. What is here is then a prefix
    of what that epoch ran.
    """
    if peer == hop.gateway:
        return Ownership.OWNER
    rank = (fence.last_started or NO_EPOCH, fence.epoch)
    is_leftover = rank[0] > hop.newest_run_epoch and not is_linked
    if has_lease and (rank <= hop.rank or (hop.started_by_owner and not is_leftover)):
        return Ownership.STALE_EPOCH
    if fence.epoch > hop.epoch and fence.last_started in (hop.newest_run_epoch, hop.epoch):
        return Ownership.TAKEN_OVER
    return Ownership.REPLACED
