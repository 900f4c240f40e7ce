"""Identifiers in messages: of processes (PeerId), routes of a session (Epoch), hops (Handle), blocks and adapters.

Used by both cores and by the links. Knows neither transports nor Kubernetes.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass
from typing import NamedTuple

Handle = int
"""The receiver's own name for (session, block range): 64 random bits, never 0, never reused."""

PeerId = str
"""`name/incarnation/boot`: a process that restarts, even in the same pod, is another peer."""

NO_HANDLE: Handle = 0
NO_GATEWAY: PeerId = ""  # owner of a hop that its gateway has relinquished

MAX_NUMBER = 1 << 62
"""Greatest epoch, position or counter of a message. Frames with a greater one are refused when they are read, so that
no process adds to it what 64 bits cannot hold. Handles and seeds are random bits, and have all 64."""


class Epoch(NamedTuple):
    """Number of a session's current route; ordered by counter, then by gateway incarnation."""

    counter: int
    gateway: int


NO_EPOCH = Epoch(0, 0)
"""The epoch before the first one of any session."""


class ForkSource(NamedTuple):
    """A hop of the addressee whose KV below `length` a new hop copies, if it is still in `epoch` (R15, forks)."""

    handle: Handle
    epoch: Epoch
    length: int


class Address(NamedTuple):
    """A peer and the target at which it can be dialled; the target is empty for a gateway, which is never dialled.

    A peer without its boot nonce (`pod_of`) stands for the process that runs in that pod now.
    """

    peer: PeerId
    target: str


@dataclass(frozen=True, slots=True)
class BlockRange:
    """The blocks [first, last) that a session runs: rows enter at the first, and leave behind the last, unchanged."""

    first: int
    last: int


class Adapter(NamedTuple):
    """A LoRA adapter as a server has it. Two servers with equal ones add the same numbers."""

    name: str  # by which clients name it instead of the model
    revision: str  # of its weights


def peer_id(name: str, incarnation: int, boot: str | None = None) -> PeerId:
    """Return the identity of this process. `boot` is random, drawn at process start, unless a test fixes it."""
    return f"{name}/{incarnation}/{boot or secrets.token_hex(8)}"


def pod_of(peer: PeerId) -> str:
    """Return the identity without its boot nonce, which is the same after a restart in the same pod."""
    return peer.rsplit("/", 1)[0]


def name_of(peer: PeerId) -> str:
    """Return the name for people: of the pod, or of the local process."""
    return peer.split("/", 1)[0]


def is_dialled_peer(peer: PeerId, dialled: PeerId) -> bool:
    """Return True if `peer` is the dialled process, or the process that now runs in the dialled pod."""
    return dialled in (peer, pod_of(peer))


def session_wire_name(model: str, session_id: str) -> str:
    """Return the protocol's name of a session that clients name by `session_id`: a hash, so any text is allowed."""
    return "named:" + hashlib.sha256(f"{model}\0{session_id}".encode()).hexdigest()[:32]
