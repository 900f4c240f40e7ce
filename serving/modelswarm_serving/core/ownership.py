"""Whose hop it is when a gateway fences one that another gateway had (R19, R20).

Pure; used by `lifecycle.py` for every Fence. The lease protects a gateway that lives, the epoch orders those that want
what it left. Knows nothing of what a hop holds.
"""

from __future__ import annotations

import enum

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence
from modelswarm_serving.core.hops.hop import Hop


class Ownership(enum.Enum):
    OWNER = "own"  # it is its owner that fences
    TAKEN_OVER = "taken"  # another one has it from now on, with all that it holds
    REPLACED = "replaced"  # nobody has it any more: it makes room for what the Fence creates
    STALE_EPOCH = "outranked"  # it stays where it is


def decide_ownership(
    hop: Hop, peer: PeerId, fence: Fence, silent: float, lease: float
) -> Ownership:
    """`silent`: for how many seconds the owner has not been heard.

    While its lease runs, the owner keeps every hop that it has run. One that it never ran is still being wanted, by it
    as by the other: there the higher epoch wins, so that of two that adopt at once one gets all hops.
    An owner whose lease was over when it spoke again is one that wants it, until it says Go.
    An owner whose lease is over holds nothing: neither may its epoch keep others out for ever.
    """
    if peer == hop.gateway:
        return Ownership.OWNER
    over = silent >= lease
    if fence.epoch > hop.epoch and (over or not hop.started_by_owner):
        return Ownership.TAKEN_OVER
    if over and fence.create is not None:
        return Ownership.REPLACED
    return Ownership.STALE_EPOCH
