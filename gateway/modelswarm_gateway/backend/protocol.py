"""The contract between generation and runtime: the backend that runs sessions.

`runtime/node.py` implements it over the core and the links; `generation/`, `api/` and `metrics/` use it. Knows neither
text nor the APIs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from modelswarm.protocol.identity import PeerId
from modelswarm_gateway.backend.model_card import ModelCard
from modelswarm_gateway.backend.token_stream import TokenStream
from modelswarm_gateway.core.explain import RouteExplanations
from modelswarm_gateway.core.interface.session_search import SessionLocation
from modelswarm_gateway.core.interface.turn import ParkedTurn, TurnRequest
from modelswarm_gateway.core.interface.views import ServerView, SessionView


class TurnBackend(Protocol):
    """Runs the turns of sessions, as one generation needs it. Calls are made on the event loop, and do not wait."""

    def open_session(self, model: str, name: str = "", epoch_floor: int = 0) -> str:
        """Open an empty session and return its name. Epochs of a named session start above `epoch_floor`."""
        ...

    def start_turn(self, session: str, request: TurnRequest) -> TokenStream:
        """Start a turn and return its tokens. Raise CoreError.

        A fork whose parent has no token yet starts when it has one. It fails with its parent.
        """
        ...

    def truncate_log(self, session: str, length: int) -> None:
        """Truncate the log of a session whose turn is over to `length` entries."""
        ...

    def park_session(self, session: str) -> None:
        """Stop the turn of a session that has no reader any more; it may be resumed later."""
        ...

    def close_session(self, session: str) -> None:
        """Close a session. Closing it again has no effect."""
        ...

    def session(self, session: str) -> SessionView | None: ...


class SessionBackend(TurnBackend, Protocol):
    """Runs sessions, and knows models and servers. Calls are made on the event loop; those not `async` do not wait."""

    def model_cards(self) -> Sequence[ModelCard]:
        """Return a card for every known model, ready or not."""
        ...

    def is_discovery_complete(self) -> bool:
        """Return True once the servers present at the start have told their models: others are not served."""
        ...

    def model_card(self, model: str) -> ModelCard | None: ...

    def raise_epoch(self, session: str, epoch_floor: int) -> None:
        """Let a kept session go on above this epoch counter, as `open_session` begins one."""
        ...

    async def find_session(self, session: str, model: str, claims: bool = False) -> SessionLocation:
        """Ask the servers for a session that is not open here. `claims`: this gateway opens it next if no other has."""
        ...

    async def take_over(
        self, where: SessionLocation, model: str, check: Callable[[ParkedTurn], object]
    ) -> bool:
        """Open a session whose gateway is gone; return False if no server has its log. `check` raises if its log is
        not the expected one."""
        ...

    def parked_turn(self, session: str) -> ParkedTurn | None:
        """Return the log and the last turn of an open session; None if it had no turn."""
        ...

    def opaque_bytes(self) -> int:
        """Return the bytes of the rows that the logs of all sessions keep in place of tokens."""
        ...

    def servers(self) -> Sequence[ServerView]: ...

    def servers_of(self, model: str) -> Sequence[ServerView]:
        """Return the servers on which new sessions of the model may run: those of one variant."""
        ...

    def unlinked_servers(self) -> Mapping[PeerId, str]:
        """Return the discovered servers without a link, and why; empty: the first dial is not over."""
        ...

    def sessions(self) -> Sequence[SessionView]: ...

    def hold_limit(self, model: str) -> float:
        """Return the hold limit of the model's sessions, in seconds; 0: sessions are not held."""
        ...

    def explain_routes(self, model: str) -> RouteExplanations:
        """Return the costs and the reasons of the routes of `model`; of all models if it is empty."""
        ...
