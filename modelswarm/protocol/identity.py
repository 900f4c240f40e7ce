"""Names that cross the wire: who a process is, which cut of a session is meant, which hop is addressed.

Used by both cores and by the links. Knows nothing of transports or of Kubernetes.
"""

from __future__ import annotations

import secrets
from typing import NamedTuple

Handle = int
"""The receiver's own name for (session, block range): 64 random bits, never 0, never reused."""

PeerId = str
"""`name/incarnation/boot`: a process that restarts, even in the same pod, is another peer."""

NO_HANDLE: Handle = 0


class Epoch(NamedTuple):
    """Number of a session's current route; ordered by counter, then by gateway incarnation."""

    counter: int
    gateway: int


NO_EPOCH = Epoch(0, 0)
"""Before the first one of any session."""


class Address(NamedTuple):
    """Where a peer can be dialled; an empty `target` means that it cannot (a gateway).

    A peer without its boot nonce (`pod_of`) is whoever lives in that pod now.
    """

    peer: PeerId
    target: str


def peer_id(name: str, incarnation: int, boot: str | None = None) -> PeerId:
    """The identity of this process. `boot` is drawn at process start unless a test fixes it."""
    return f"{name}/{incarnation}/{boot or secrets.token_hex(8)}"


def pod_of(peer: PeerId) -> str:
    """What survives a restart inside the same pod: the identity without its boot nonce."""
    return peer.rsplit("/", 1)[0]


def name_of(peer: PeerId) -> str:
    """What people call it: a pod's name, a member's."""
    return peer.split("/", 1)[0]


def is_dialled_peer(peer: PeerId, dialled: PeerId) -> bool:
    """Whether `peer` is who was dialled: that very life, or the present one of that pod."""
    return dialled in (peer, pod_of(peer))
