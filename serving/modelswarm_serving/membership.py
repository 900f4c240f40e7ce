"""What a server that serves says of itself to gateways on this machine, in its file in the members folder.

Made by `introduction.py`, written by `node.py` when everything is ready and removed when it stops.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Member:
    name: str
    peer: str
    target: str
    model: str
    revision: str
    first: int
    last: int
    n_blocks: int
    metrics: str
