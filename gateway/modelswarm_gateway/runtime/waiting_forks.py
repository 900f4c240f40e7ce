"""First turns of forks (R15) that wait for a token of their parent: from then on the KV of its prompt can be copied.

Used by the node, which starts or fails them. Knows neither the core nor links.
"""

from __future__ import annotations

from dataclasses import dataclass

from modelswarm_gateway.backend.token_stream import TokenStream
from modelswarm_gateway.core.interface.turn import TurnRequest


@dataclass(frozen=True, slots=True)
class WaitingTurn:
    session: str
    request: TurnRequest
    stream: TokenStream


class WaitingForks:
    def __init__(self) -> None:
        self._waiting: dict[str, list[WaitingTurn]] = {}  # by parent
        self._due: list[WaitingTurn] = []
        self._refused: set[str] = set()  # sessions whose turn was refused, and may be tried again

    def must_wait(self, request: TurnRequest) -> bool:
        """Return whether this is another answer to a prompt whose first answer was refused."""
        return request.sampling.choice > 0 and request.parent in self._refused

    def add_turn(self, turn: WaitingTurn) -> None:
        self._waiting.setdefault(turn.request.parent, []).append(turn)

    def on_begun(self, parent: str) -> None:
        """The parent has a token: its forks are due."""
        self._refused.discard(parent)
        self._due += self._waiting.pop(parent, [])

    def on_ended(self, parent: str) -> list[WaitingTurn]:
        """The parent ends without a token. Return the turns that fail with it: the other answers to its prompt.

        A fork has a log of its own, which it computes itself: it is due.
        """
        self._refused.discard(parent)
        return self._release_forks(parent)

    def on_refused(self, parent: str) -> None:
        """The parent's turn is refused for now: the other answers to its prompt wait until it is tried again, or ends.

        A fork does not: it is due.
        """
        self._refused.add(parent)
        if answers := self._release_forks(parent):
            self._waiting[parent] = answers

    def _release_forks(self, parent: str) -> list[WaitingTurn]:
        """Make the forks of a parent due; return the other answers to its prompt."""
        waiting = self._waiting.pop(parent, [])
        self._due += [turn for turn in waiting if not turn.request.sampling.choice]
        return [turn for turn in waiting if turn.request.sampling.choice]

    def take_due(self) -> list[WaitingTurn]:
        due, self._due = self._due, []
        return due
