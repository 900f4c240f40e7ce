"""Dialer: dials every endpoint of its source until it is linked.

The node calls `dial_due` periodically and reports the end of each dial. A failed dial is repeated with growing pauses
while the source shows the endpoint; a new change token makes it due at once. Sources are the discovery folder
(`file_source.py`) and the pods of a cluster (`kubernetes_source.py`). Knows no links, only a function that dials.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from modelswarm.protocol.identity import Address, PeerId, pod_of

log = logging.getLogger(__name__)

# First and longest pause between two dials of a server, in seconds: after a failed dial, or after a link that broke
# within STABLE_SECONDS. The longest one is shorter than the wait for a server that may know another owner of a session
# (`relink_seconds`).
FIRST_PAUSE, MAX_PAUSE = 0.1, 2.0
STABLE_SECONDS = 10.0
# Seconds without a link after which a server is taken for dead, although its endpoint still exists.
DEAD_SECONDS = 60.0
# Seconds after which a server that has neither answered nor refused a dial no longer holds up discovery.
SETTLE_SECONDS = 30.0
# Part of the error if no process listens on the port: the server that did has ended.
REFUSED = "connection refused"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address at which a server can be dialled. `change_token` differs after each change of the server."""

    address: Address
    change_token: str = ""


class EndpointSource(Protocol):
    """Source of the servers that exist."""

    def endpoints(self) -> Mapping[PeerId, Endpoint]:
        """Return all present endpoints by peer id; the id of a pod's server lacks its boot nonce."""
        ...


class ModelSource(EndpointSource, Protocol):
    """Source of the servers that exist, and of their models."""

    def is_listed(self) -> bool:
        """Return True once the endpoints are all that there are."""
        ...

    def expected_models(self) -> frozenset[str] | None:
        """Return the names of all models that have or will have servers. None: only linked servers tell."""
        ...


@dataclass(slots=True)
class _Dial:
    change_token: str
    pause: float = FIRST_PAUSE
    due_at: float | None = 0.0  # None: in progress, or linked
    failure: str = ""  # reason why the last dial failed
    added_at: float = 0.0
    tried: bool = False
    is_known: bool = False  # it was linked once, or its port refused a dial: there is no server
    is_linked: bool = False
    # Names of the model and the adapters of the server that was linked last; none if it has ended.
    models: frozenset[str] = frozenset()
    linked_at: float = 0.0  # time at which the last link was up
    lost_at: float = 0.0  # time at which it was lost
    link_pause: float = FIRST_PAUSE  # after the next loss of a link


class Dialer:
    def __init__(
        self, source: EndpointSource, dial: Callable[[Address], None], clock: Callable[[], float]
    ) -> None:
        self._source, self._dial, self._clock = source, dial, clock
        self._dials: dict[PeerId, _Dial] = {}

    def dial_due(self) -> None:
        """Read the endpoints and dial those that are due."""
        present = self._source.endpoints()
        for peer in self._dials.keys() - present.keys():
            if not self._dials[peer].is_linked:  # its endpoint may return, and is not dialled then
                del self._dials[peer]
        now = self._clock()
        for peer, place in present.items():
            dial = self._dials.setdefault(peer, _Dial(place.change_token, added_at=now))
            if dial.change_token != place.change_token:
                dial.change_token = place.change_token
                dial.pause = dial.link_pause = FIRST_PAUSE
                dial.due_at = now if dial.due_at is not None else None
            if dial.due_at is not None and dial.due_at <= now:
                dial.due_at = None
                self._dial(place.address)

    @property
    def has_endpoints(self) -> bool:
        return bool(self._dials)

    def is_settled(self) -> bool:
        """Return True when every present endpoint has told its models, or has had the time for it.

        A failed dial tells nothing: a busy server does not answer within the limit, and serves its model all the same.
        """
        begin = self._clock() - SETTLE_SECONDS
        return all(dial.is_known or dial.added_at < begin for dial in self._dials.values())

    def unreachable_servers(self, model: str) -> list[PeerId]:
        """Return the endpoints without a link whose server may be running and serve the model.

        Their link was lost recently, or their first dial is still in progress. A refused connection means that the
        server has ended; an endpoint that could never be dialled is starting.
        """
        return [
            peer
            for peer, dial in self._dials.items()
            if not dial.tried or (model in dial.models and self._was_lost_recently(dial))
        ]

    def unlinked_servers(self) -> dict[PeerId, str]:
        """Return the present endpoints without a link, and why their last dial failed; empty before its end."""
        return {peer: dial.failure for peer, dial in self._dials.items() if not dial.is_linked}

    def may_be_running(self, peer: PeerId) -> bool:
        """Return whether a server that has lost its link may still be running."""
        dial = self._find_dial(peer)
        return dial is not None and bool(dial.models) and self._was_lost_recently(dial)

    def _was_lost_recently(self, dial: _Dial) -> bool:
        return not dial.is_linked and dial.lost_at > self._clock() - DEAD_SECONDS

    def on_peer_connected(self, peer: PeerId, models: Iterable[str]) -> None:
        """`models`: names of the server's model and of its adapters."""
        dial = self._find_dial(peer)
        if dial is not None:
            dial.pause, dial.due_at, dial.failure = FIRST_PAUSE, None, ""
            dial.tried = dial.is_linked = dial.is_known = True
            dial.linked_at = self._clock()
            dial.models = frozenset(models)

    def on_peer_lost(self, peer: PeerId, reason: str) -> None:
        """Schedule the next dial after a lost link or a failed dial; each pause is longer."""
        dial = self._find_dial(peer)
        if dial is None or dial.due_at is not None:
            return
        # A server that loads for long fails many dials: log its reason once.
        if not dial.is_linked and dial.failure != reason:
            log.info("cannot link to %s: %s", peer, reason)
        if dial.is_linked:
            dial.lost_at = self._clock()
            if dial.lost_at - dial.linked_at >= STABLE_SECONDS:
                dial.link_pause = FIRST_PAUSE
            dial.pause, dial.link_pause = dial.link_pause, min(2 * dial.link_pause, MAX_PAUSE)
        elif REFUSED in reason.lower():
            dial.models, dial.is_known = frozenset(), True
        dial.tried, dial.is_linked, dial.failure = True, False, reason
        dial.due_at = self._clock() + dial.pause
        dial.pause = min(2 * dial.pause, MAX_PAUSE)

    def _find_dial(self, peer: PeerId) -> _Dial | None:
        return self._dials.get(peer) or self._dials.get(pod_of(peer))
