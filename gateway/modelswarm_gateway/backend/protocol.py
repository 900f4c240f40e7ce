"""What runs sessions, as the service sees it: the contract `Engine`, and the stream of one turn's tokens.

`node.py` implements it over the core and the links; tests over something small. Knows nothing of text or of doors.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from modelswarm.protocol.messages import Finish
from modelswarm_gateway.core.explain import Reasons
from modelswarm_gateway.core.interface.session_search import Whereabouts
from modelswarm_gateway.core.interface.turn import KeptTurn, TurnRequest
from modelswarm_gateway.core.interface.views import ServerView, SessionView
from modelswarm_gateway.errors import ApiError
from modelswarm_gateway.models.tokenizer import ModelTokenizer


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Log entry `position`; token -1 when the turn only read its prompt."""

    position: int
    token: int
    finish: Finish


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One model as the gateway serves it."""

    name: str
    revision: str
    n_blocks: int
    missing_blocks: tuple[int, ...]  # blocks without a server
    max_length: int  # positions of the context; 0: not known now
    tokenizer: ModelTokenizer | None  # None: its files have not come yet
    known_since: int  # unix seconds

    @property
    def ready(self) -> bool:
        return self.tokenizer is not None and not self.missing_blocks and self.n_blocks > 0


class TokenStream:
    """The tokens of one turn, from the engine to one reader. It holds at most what the credit let through."""

    def __init__(
        self, first: int, read_to: Callable[[int], None], stop_at: Callable[[int], None]
    ) -> None:
        self.first_position = first  # position of the first generated token
        self.read_to = read_to  # the client has taken everything below this position
        self.stop_at = stop_at  # keep so many log entries and end the turn
        self._events: deque[TokenEvent] = deque()
        self._failure: ApiError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False  # no more events will be put
        self.reroutes = 0  # faults that sent it to look for a route
        self.fault_cause = ""  # of the first fault since its last token

    def add_event(self, event: TokenEvent) -> None:
        if self.ended:
            return
        self._events.append(event)
        if event.finish is not Finish.NONE:
            self.ended = True
        self._wake()

    def fail(self, error: ApiError) -> None:
        """The turn ends here; the reader hears of it after what was put before. Later failures are dropped."""
        if not self.ended:
            self.ended = True
            self._failure = error
            self._wake()

    def abort(self, error: ApiError) -> None:
        """The reader is to stop at once, whatever it has not read."""
        self._events.clear()
        self.ended = True
        self._failure = error
        self._wake()

    async def next_events(self, timeout: float) -> Sequence[TokenEvent]:
        """What has come, at least one event; nothing at all after `timeout` seconds. One reader only.

        Raises the ApiError that ended the turn.
        """
        if not self._events and self._failure is None:
            await self._wait(timeout)
        if self._events:
            events = tuple(self._events)
            self._events.clear()
            return events
        if self._failure is not None:
            raise self._failure
        return ()

    async def _wait(self, timeout: float) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class RecoveryResult:
    """How a session's search for a route ended."""

    OUTCOMES: ClassVar = ("resumed", "failed", "abandoned")

    cause: str  # of its first fault
    outcome: str  # abandoned: the turn ended before it had to go on
    seconds: float | None = None  # from that fault to the next token


class EventObserver(Protocol):
    """Is told of faults, to count them."""

    def on_rerouted(self, model: str, cause: str) -> None: ...

    def on_recovered(self, model: str, recovery: RecoveryResult) -> None: ...

    def on_migrated(self, model: str, cause: str, outcome: str) -> None: ...

    def on_ejected(self, model: str, cause: str) -> None: ...


class SessionBackend(Protocol):
    """All calls are on the event loop and return at once."""

    def model_cards(self) -> Sequence[ModelCard]:
        """Every model known here, ready or not."""
        ...

    def is_discovery_complete(self) -> bool:
        """Whether every server that was there at the start has been tried: who is no card now, is not served."""
        ...

    def model_card(self, model: str) -> ModelCard | None: ...

    def open_session(self, model: str, name: str = "", epoch_floor: int = 0) -> str:
        """A new, empty session; its name. One with a name of its own has epochs above those of earlier ones."""
        ...

    async def find_session(self, session: str, model: str, claims: bool = False) -> Whereabouts:
        """What the servers know of a session that is not open here. `opens`: it is next, if nobody else has it."""
        ...

    async def take_over(
        self, where: Whereabouts, model: str, check: Callable[[Sequence[int]], None]
    ) -> bool:
        """Opens what another gateway left; False if that cannot be. `check` raises if its log is not the right one."""
        ...

    def kept_turn(self, session: str) -> KeptTurn | None:
        """The log of an open session and its last turn; None if it has none."""
        ...

    def truncate_log(self, session: str, length: int) -> None:
        """Cut the log of a session whose turn is over."""
        ...

    def park_session(self, session: str) -> None:
        """Nobody reads its turn any more: it stands still, and may go on later."""
        ...

    def start_turn(self, session: str, request: TurnRequest) -> TokenStream:
        """Raises CoreError."""
        ...

    def close_session(self, session: str) -> None:
        """Also when it is closed already."""
        ...

    def servers(self) -> Sequence[ServerView]: ...

    def sessions(self) -> Sequence[SessionView]: ...

    def session(self, session: str) -> SessionView | None: ...

    def hold_limit(self, model: str) -> float:
        """How long its sessions may be held; 0: not at all."""
        ...

    def explain_routes(self, model: str) -> Reasons:
        """Why routes are as they are; "": for all models."""
        ...
