"""Reports violations: of every answer as it ends, and of the swarm at the end of a run.

The oracles of docs/protocol.md ("The same output") and the invariants, as far as clients and metrics can see them:

- Delivered tokens are the twin's answer or its beginning (oracles 1 and 3), or the picks of the whole model (oracle 2).
- Every token is delivered once and in order (I2, I3).
- An end without a finish reason names its error, and that error had a cause (I8).
- No wait exceeds its bound.
- No page is held without a session (I5), and no process is left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from chaos.schedule import LEASE_SECONDS
from support.chaos.clients import Observation
from support.chaos.resuming_client import GO_ON
from support.models.tiny_models import TOY_LENGTH
from support.processes.streams import Answer, Request

GATEWAY_GONE = ("UNAVAILABLE", "CANCELLED", "gateway_stopping")
REFUSALS = ("no_capacity", "no_servers")
ELSEWHERE = "session_elsewhere"
AFTER_A_KILL = ("model_not_found", "session_busy", ELSEWHERE)
LOST = "session_lost"  # no server has all tokens that the client received
ANOTHER = "has answered another prompt"  # the gateway has the session without the last turn
LONG_WAIT = 2.0  # seconds; longer waits are logged
REFUSAL_SECONDS = 60.0  # seconds of refusals only: servers are back much earlier
AROUND_AN_OUTAGE = 20.0  # seconds in which calls may fail: a gateway was killed and starts again
LEASES = 30.0  # seconds after which a lost gateway must not affect any client


AT_ONCE = 1.0  # seconds; the servers of a received token ran so shortly before


@dataclass(frozen=True, slots=True)
class Outage:
    """An interval of time.monotonic in which a gateway was lost, or the log copies of a tail.

    The gateway was killed, was stopped, or, with several gateways, had a bad link.
    """

    began: float
    ended: float
    killed: bool


class Wrong(Exception):
    """A violation; the message describes it."""


@dataclass(slots=True)
class Tally:
    answers: int = 0  # complete answers
    begun: int = 0  # answers that ended with an error after their first token
    refused: int = 0
    left: int = 0
    tokens: int = 0
    torn: int = 0  # answers whose connection broke after a token and whose readers resume
    resumed: int = 0  # of these, the completed ones
    near_ties: int = 0  # answers that differ from their twin where rounding may decide
    waits: list[float] = field(default_factory=list)  # the longest of each answer
    codes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Oracle:
    """Collects violations. `settle` checks an answer that differs from its twin, on a model whose arithmetic rounds."""

    longest_wait: float  # longest allowed seconds until the next token
    outages: Sequence[Outage]  # grows
    settle: Callable[[Answer, Answer], None] | None
    gateways: int = 1
    losses: Sequence[Outage] = ()  # of servers of the last span, or of room there; grows
    forks: bool = False  # a gateway may have opened a second session of a name
    note: Callable[[float, str], None] = lambda at, words: None
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list)
    differing: list[tuple[Answer, Answer]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def observe(self, observed: Observation) -> None:
        with self._lock:
            self._count(observed)
            try:
                self._check(observed)
            except Wrong as wrong:
                self.fail(f"{observed.who}: {wrong} [{describe(observed)}]")

    def fail(self, words: str) -> None:
        self.wrong.append(words)

    def finish(self) -> None:
        """Check the answers that differ from their twins: slow, so it runs after the streams."""
        assert self.settle is not None or not self.differing
        for twin, answer in self.differing:
            assert self.settle is not None
            try:
                self.settle(twin, answer)
            except AssertionError as problem:
                self.fail(f"{problem} [{len(answer.request.prompt)} + {answer.request.new}]")
            else:
                self.tally.near_ties += 1

    def _count(self, observed: Observation) -> None:
        tally = self.tally
        tally.tokens += len(observed.answer.tokens)
        tally.answers += bool(observed.answer.finish)
        tally.left += observed.left
        tally.torn += bool(observed.torn)
        tally.resumed += bool(observed.torn and observed.answer.finish)
        if observed.code:
            tally.codes[observed.code] += 1
            if observed.answer.tokens:
                tally.begun += 1
            else:
                tally.refused += 1
        if observed.code == LOST:
            text = f"{observed.who} has lost {observed.answer.request.session} after {observed.last_wait:.2f} s"
            self.note(observed.ended, f"{text}: {observed.details}")
        if observed.answer.tokens:
            tally.waits.append(observed.longest_wait)
            if observed.longest_wait > LONG_WAIT:
                text = f"{observed.who} goes on after {observed.longest_wait:.2f} s"
                self.note(observed.waited_until, text)

    def _check(self, observed: Observation) -> None:
        answer, twin = observed.answer, observed.twin
        first = len(answer.request.prompt)
        if answer.positions != tuple(range(first, first + len(answer.tokens))):
            raise Wrong(f"positions {answer.positions} after a prompt of {first}")
        if observed.longest_wait > self.longest_wait:
            raise Wrong(f"it waited for {observed.longest_wait:.1f} s")
        self._check_end(observed)
        if observed.breaks and not self._outage(observed, LEASES):
            raise Wrong(
                f"its connection broke off {observed.breaks} times, and no gateway was hurt"
            )
        if answer.finish == "length" and len(answer.tokens) != most(answer.request):
            raise Wrong(f"it ends after {len(answer.tokens)} tokens with {answer.finish!r}")
        if answer.tokens != twin.tokens[: len(answer.tokens)]:
            self._part(replace(answer, request=replace(answer.request, session="")), twin)
        elif not answer.finish:
            if not twin.text.startswith(answer.text):
                raise Wrong(f"its text is no beginning of the right one: {answer.text!r}")
        elif (answer.text, answer.finish, answer.tokens) != (twin.text, twin.finish, twin.tokens):
            raise Wrong(f"it ends after {len(answer.tokens)} tokens with {answer.finish!r}")

    def _part(self, answer: Answer, twin: Answer) -> None:
        """On the hash model equality is exact; elsewhere a near tie may be decided otherwise."""
        if self.settle is not None:
            self.differing.append((twin, answer))
            return
        both = zip(answer.tokens, twin.tokens, strict=False)
        parted = next((i for i, (a, b) in enumerate(both) if a != b), len(twin.tokens))
        raise Wrong(f"token {parted} of {len(answer.tokens)} is another than without faults")

    def _check_end(self, observed: Observation) -> None:
        if observed.left or observed.answer.finish:
            return
        nothing = not observed.answer.tokens
        if nothing and observed.code in (*REFUSALS, *self._elsewhere(observed)):
            if observed.ended - observed.asked > REFUSAL_SECONDS:
                raise Wrong(f"nothing but refusals for {observed.ended - observed.asked:.0f} s")
            return
        lost = observed.code == LOST or (self.gateways > 1 and ANOTHER in observed.details)
        if lost and not self._may_be_lost(observed):
            raise Wrong(f"it was lost after {observed.last_wait:.1f} s: {observed.details}")
        again = nothing and (observed.code in AFTER_A_KILL or GO_ON in observed.details)
        if self._outage(observed, LEASES) and (lost or again):
            return  # it restarts without its sessions, and they have no owner until the lease has expired
        if observed.code in GATEWAY_GONE and self._outage(observed, AROUND_AN_OUTAGE, killed=True):
            return
        raise Wrong(f"it ended with {observed.code!r}: {observed.details}")

    def _may_be_lost(self, observed: Observation) -> bool:
        """Return True if the tail was lost too, or two leases passed: a tail keeps all read tokens for so long."""
        if self.forks or observed.last_wait >= 2 * LEASE_SECONDS:
            return True
        read = observed.ended - observed.last_wait - AT_ONCE
        return any(each.began <= observed.ended and read <= each.ended for each in self.losses)

    def _elsewhere(self, observed: Observation) -> tuple[str, ...]:
        """Return the code of a gateway without links to the servers of a session: it opens the session as a new one."""
        return (ELSEWHERE,) if observed.answer.request.session and self.gateways > 1 else ()

    def _outage(self, observed: Observation, after: float, *, killed: bool = False) -> bool:
        """Return True if a gateway had an outage during the request, or up to `after` seconds before."""
        return any(
            outage.began <= observed.ended
            and observed.began - after <= outage.ended
            and (outage.killed or not killed)
            for outage in self.outages
        )


def most(request: Request) -> int:
    """Return the tokens of an answer that ends by its length."""
    return min(request.new, TOY_LENGTH - len(request.prompt))


def describe(observed: Observation) -> str:
    request = observed.answer.request
    return (
        f"prompt {len(request.prompt)}, {len(observed.answer.tokens)} of {len(observed.twin.tokens)} tokens, "
        f"session {request.session!r}, from {observed.began:.3f} to {observed.ended:.3f} of {time.monotonic():.3f}"
    )
