"""Base class of the processes on the in-memory network: the calls that the network makes. They do nothing here.

Base of `Server`, `Gateway`, `ScriptedServer` and `ScriptedGateway`. Knows no core and no lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat, Hello, Item, Send


@dataclass(eq=False)
class Actor:
    hello: Hello  # sent when a link opens
    frozen: bool = field(default=False, kw_only=True)  # SIGSTOP: links up, items queued

    @property
    def peer(self) -> PeerId:
        return self.hello.peer

    def connect(self, hello: Hello, now: float) -> None:
        """Handle a new link to another process."""

    def disconnect(self, peer: PeerId, now: float) -> None:
        """Handle the loss of the link to another process."""

    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        """Handle an item."""

    def take_sends(self) -> list[Send]:
        """Return and forget the items to send."""
        return []

    def step(self, now: float) -> bool:
        """Begin or end one step. Return False if there is nothing to do."""
        return False

    def tick(self, now: float) -> None:
        """Handle the passing of time."""

    def heartbeat(self) -> Heartbeat | None:
        """Return the heartbeat for all peers, or None."""
        return None
