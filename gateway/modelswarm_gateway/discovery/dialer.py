"""Which servers are dialled, and when: every place that its source shows, until it is linked.

The node asks it to `poll` and tells it how dials end. A failing dial is repeated while the source shows the place,
with pauses that grow; a place that goes ends that, and news of it is a reason to try at once. Links that are up are
not its business. Sources are the members folder (`members.py`) and the pods of a cluster (`pods.py`). Knows no links,
only a function that dials.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from modelswarm.protocol.identity import Address, PeerId, pod_of

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.1  # seconds between a failed dial and the next
MAX_PAUSE = 2.0
DEAD_SECONDS = (
    60.0  # seconds without a link: the server is taken for dead, though its place is there
)
REFUSED = "connection refused"  # what gRPC says where nobody listens: who did is dead


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server can be dialled. `news` is another whenever something happened to it."""

    address: Address
    change_token: str = ""


class EndpointSource(Protocol):
    """Who tells which servers exist."""

    def endpoints(self) -> Mapping[PeerId, Endpoint]:
        """All places there are now, by the peer that is dialled there: in full, or whoever lives in a pod."""
        ...

    def expected_models(self) -> frozenset[str] | None:
        """The names of all models that have servers, or are to have some. None: only who is linked tells."""
        ...


@dataclass(slots=True)
class _Dial:
    change_token: str
    pause: float = FIRST_PAUSE
    due_at: float | None = 0.0  # None: under way, or linked
    failure: str = ""  # why the last one ended
    tried: bool = False
    is_linked: bool = False
    model: str = ""  # of who was linked last; "": nobody was, or it is dead
    lost_at: float = 0.0  # when that link did


class Dialer:
    def __init__(
        self, source: EndpointSource, dial: Callable[[Address], None], clock: Callable[[], float]
    ) -> None:
        self._source, self._dial, self._clock = source, dial, clock
        self._dials: dict[PeerId, _Dial] = {}

    def dial_due(self) -> None:
        """Sees who is there now and dials whoever is due."""
        present = self._source.endpoints()
        for peer in self._dials.keys() - present.keys():
            del self._dials[peer]
        now = self._clock()
        for peer, place in present.items():
            dial = self._dials.setdefault(peer, _Dial(place.change_token))
            if dial.change_token != place.change_token:
                dial.change_token, dial.pause = place.change_token, FIRST_PAUSE
                dial.due_at = now if dial.due_at is not None else None
            if dial.due_at is not None and dial.due_at <= now:
                dial.due_at = None
                self._dial(place.address)

    def is_settled(self) -> bool:
        """Whether everybody who is present has been tried."""
        return all(dial.tried for dial in self._dials.values())

    def unreachable_servers(self, model: str) -> list[PeerId]:
        """Places whose server may live and serve the model, and has no link: it broke not long ago, or the first dial
        is still under way. Where nobody listens nobody lives, and who never could be dialled is starting.
        """
        return [
            peer
            for peer, dial in self._dials.items()
            if not dial.tried or (dial.model == model and self._was_lost_recently(dial))
        ]

    def may_be_running(self, peer: PeerId) -> bool:
        """Whether a server that has lost its link is perhaps still there."""
        dial = self._find_dial(peer)
        return dial is not None and dial.model != "" and self._was_lost_recently(dial)

    def _was_lost_recently(self, dial: _Dial) -> bool:
        return not dial.is_linked and dial.lost_at > self._clock() - DEAD_SECONDS

    def on_peer_connected(self, peer: PeerId, model: str) -> None:
        dial = self._find_dial(peer)
        if dial is not None:
            dial.pause, dial.due_at, dial.failure = FIRST_PAUSE, None, ""
            dial.tried = dial.is_linked = True
            dial.model = model

    def on_peer_lost(self, peer: PeerId, reason: str) -> None:
        """The link broke or could not be made: dial again, later each time."""
        dial = self._find_dial(peer)
        if dial is None or dial.due_at is not None:
            return
        if (
            not dial.is_linked and dial.failure != reason
        ):  # a server that loads for long is one line
            log.info("%s cannot be linked: %s", peer, reason)
        if dial.is_linked:
            dial.lost_at = self._clock()
        elif REFUSED in reason.lower():
            dial.model = ""
        dial.tried, dial.is_linked, dial.failure = True, False, reason
        dial.due_at = self._clock() + dial.pause
        dial.pause = min(2 * dial.pause, MAX_PAUSE)

    def _find_dial(self, peer: PeerId) -> _Dial | None:
        return self._dials.get(peer) or self._dials.get(pod_of(peer))
