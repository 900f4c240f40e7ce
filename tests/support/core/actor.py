"""A process on the in-memory network, as far as the network drives it; does nothing by itself.

Base of `Server`, `Gateway`, `ScriptedServer` and `ScriptedGateway`. Knows no core and no lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat, Hello, Item, Send


@dataclass(eq=False)
class Actor:
    hello: Hello  # what it says of itself when a link opens
    frozen: bool = field(default=False, kw_only=True)  # SIGSTOP: its links stay up, its items wait

    @property
    def peer(self) -> PeerId:
        return self.hello.peer

    def connect(self, hello: Hello, now: float) -> None:
        """A link to another process is up."""

    def disconnect(self, peer: PeerId, now: float) -> None:
        """The link to another process is lost."""

    def receive(self, sender: PeerId, item: Item, now: float) -> None:
        """An item arrives."""

    def take_sends(self) -> list[Send]:
        """Return what it wants to send, once."""
        return []

    def step(self, now: float) -> bool:
        """Begin or end one step. Return False if there is nothing to do."""
        return False

    def tick(self, now: float) -> None:
        """Time has passed."""

    def heartbeat(self) -> Heartbeat | None:
        """Return what it tells its peers regularly; None: nothing."""
        return None
