"""Ownership of a hop when a gateway fences one that belongs to another gateway (R19: leases, R20: takeover).

Pure; used by `fencing.py` for every Fence. The lease protects a running gateway; the epoch orders the gateways that
claim the sessions of a lost one. Knows nothing of what a hop holds.
"""

from __future__ import annotations

import enum

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence
from modelswarm_serving.core.hops.hop import Hop


class Ownership(enum.Enum):
    OWNER = "owner"  # the owner itself fences
    TAKEN_OVER = "taken_over"  # the other gateway owns it from now on, with its state
    REPLACED = "replaced"  # it is freed, and the Fence creates a new hop
    STALE_EPOCH = "stale_epoch"  # the Fence is refused


def decide_ownership(
    hop: Hop, peer: PeerId, fence: Fence, silent: float, lease: float
) -> Ownership:
    """Decide a Fence of `peer`; `silent` is the time in seconds since the last message of the owner.

    While its lease runs, the owner keeps every hop that it has started. A hop that it never started goes to the higher
    epoch, so that one of two simultaneous takeovers gets all hops. An owner that returns after its lease has expired
    competes by epoch as well, until its StartEpoch.
    An owner with an expired lease keeps no hop; its epoch must not keep others out for ever.
    """
    if peer == hop.gateway:
        return Ownership.OWNER
    over = silent >= lease
    if fence.epoch > hop.epoch and (over or not hop.started_by_owner):
        return Ownership.TAKEN_OVER
    if over and fence.create is not None:
        return Ownership.REPLACED
    return Ownership.STALE_EPOCH
