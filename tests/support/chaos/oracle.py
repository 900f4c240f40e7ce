"""Says what was wrong: of every answer as it ends, and of the swarm when all is over.

The oracles of PROTOCOL section 4 and the invariants, as far as a client and the metrics can see them:
what was delivered is the twin's answer or its beginning (1, 3), or what the whole model picks (2); every token once
and in order (I2, I3); an end that is no finish names its error, and for a reason that there was (I8); no wait beyond
its bound; no page held when nobody holds a session (I5); no process left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from chaos.schedule import LEASE_SECONDS
from support.chaos.clients import Heard
from support.chaos.resuming_client import GO_ON
from support.models.tiny_models import TOY_LENGTH
from support.processes.streams import Answer, Ask

GATEWAY_GONE = ("UNAVAILABLE", "CANCELLED", "gateway_stopping")
REFUSALS = ("no_capacity", "no_servers")
ELSEWHERE = "session_elsewhere"
AFTER_A_KILL = ("model_not_found", "session_busy", ELSEWHERE)
LOST = "session_lost"  # nobody has all that the client was told
ANOTHER = "has answered another prompt"  # it has the session as it was a turn ago
LONG_WAIT = 2.0  # seconds: worth a line in the log
PATIENCE = 60.0  # seconds of nothing but refusals: servers are back after a few of them
AROUND_AN_OUTAGE = 20.0  # seconds in which calls may fail: a gateway was killed and starts again
LEASES = 30.0  # seconds after which nobody may suffer any more from what became of a gateway


AT_ONCE = 1.0  # seconds; a token that is read comes from servers that lived so shortly before


@dataclass(frozen=True, slots=True)
class Outage:
    """A gateway was killed, stood still, or, of several, had a bad link. Of time.monotonic. Or what a tail kept went
    with it."""

    began: float
    ended: float
    killed: bool


class Wrong(Exception):
    """An answer that must not be; the message says how."""


@dataclass(slots=True)
class Tally:
    answers: int = 0  # that ended well
    begun: int = 0  # that ended with an error after their first token
    refused: int = 0
    left: int = 0
    tokens: int = 0
    torn: int = 0  # answers whose connection broke in their midst, and whose readers do not give up
    resumed: int = 0  # of these, how many came to their ends
    near_ties: int = 0  # answers that part from their twin where rounding may decide
    waits: list[float] = field(default_factory=list)  # the longest of each answer
    codes: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Judge:
    """`settle` judges an answer that differs from its twin, on a model whose arithmetic rounds."""

    longest_wait: float  # seconds that anybody may wait for the next token
    outages: Sequence[Outage]  # grows
    settle: Callable[[Answer, Answer], None] | None
    gateways: int = 1
    losses: Sequence[Outage] = ()  # of servers of the last span, or of room there; grows
    forks: bool = False  # a gateway may have begun another session of a name
    note: Callable[[float, str], None] = lambda at, words: None
    tally: Tally = field(default_factory=Tally)
    wrong: list[str] = field(default_factory=list)
    differing: list[tuple[Answer, Answer]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def hear(self, heard: Heard) -> None:
        with self._lock:
            self._count(heard)
            try:
                self._judge(heard)
            except Wrong as wrong:
                self.blame(f"{heard.who}: {wrong} [{describe(heard)}]")

    def blame(self, words: str) -> None:
        self.wrong.append(words)

    def finish(self) -> None:
        """What takes long: once the streams are over."""
        assert self.settle is not None or not self.differing
        for twin, answer in self.differing:
            assert self.settle is not None
            try:
                self.settle(twin, answer)
            except AssertionError as problem:
                self.blame(f"{problem} [{len(answer.ask.prompt)} + {answer.ask.new}]")
            else:
                self.tally.near_ties += 1

    def _count(self, heard: Heard) -> None:
        tally = self.tally
        tally.tokens += len(heard.answer.tokens)
        tally.answers += bool(heard.answer.finish)
        tally.left += heard.left
        tally.torn += bool(heard.torn)
        tally.resumed += bool(heard.torn and heard.answer.finish)
        if heard.code:
            tally.codes[heard.code] += 1
            if heard.answer.tokens:
                tally.begun += 1
            else:
                tally.refused += 1
        if heard.code == LOST:
            said = f"{heard.who} has lost {heard.answer.ask.session} after {heard.last_wait:.2f} s"
            self.note(heard.ended, f"{said}: {heard.details}")
        if heard.answer.tokens:
            tally.waits.append(heard.longest_wait)
            if heard.longest_wait > LONG_WAIT:
                said = f"{heard.who} goes on after {heard.longest_wait:.2f} s"
                self.note(heard.waited_until, said)

    def _judge(self, heard: Heard) -> None:
        answer, twin = heard.answer, heard.twin
        first = len(answer.ask.prompt)
        if answer.positions != tuple(range(first, first + len(answer.tokens))):
            raise Wrong(f"positions {answer.positions} after a prompt of {first}")
        if heard.longest_wait > self.longest_wait:
            raise Wrong(f"it waited for {heard.longest_wait:.1f} s")
        self._judge_end(heard)
        if heard.breaks and not self._outage(heard, LEASES):
            raise Wrong(f"its connection broke off {heard.breaks} times, and no gateway was hurt")
        if answer.finish == "length" and len(answer.tokens) != most(answer.ask):
            raise Wrong(f"it ends after {len(answer.tokens)} tokens with {answer.finish!r}")
        if answer.tokens != twin.tokens[: len(answer.tokens)]:
            self._part(replace(answer, ask=replace(answer.ask, session="")), twin)
        elif not answer.finish:
            if not twin.text.startswith(answer.text):
                raise Wrong(f"its text is no beginning of the right one: {answer.text!r}")
        elif (answer.text, answer.finish, answer.tokens) != (twin.text, twin.finish, twin.tokens):
            raise Wrong(f"it ends after {len(answer.tokens)} tokens with {answer.finish!r}")

    def _part(self, answer: Answer, twin: Answer) -> None:
        """On the hash model equality is exact; elsewhere a near tie may have fallen the other way."""
        if self.settle is not None:
            self.differing.append((twin, answer))
            return
        both = zip(answer.tokens, twin.tokens, strict=False)
        parted = next((i for i, (a, b) in enumerate(both) if a != b), len(twin.tokens))
        raise Wrong(f"token {parted} of {len(answer.tokens)} is another than without faults")

    def _judge_end(self, heard: Heard) -> None:
        if heard.left or heard.answer.finish:
            return
        nothing = not heard.answer.tokens
        if nothing and heard.code in (*REFUSALS, *self._elsewhere(heard)):
            if heard.ended - heard.asked > PATIENCE:
                raise Wrong(f"nothing but refusals for {heard.ended - heard.asked:.0f} s")
            return
        lost = heard.code == LOST or (self.gateways > 1 and ANOTHER in heard.details)
        if lost and not self._may_be_lost(heard):
            raise Wrong(f"it was lost after {heard.last_wait:.1f} s: {heard.details}")
        again = nothing and (heard.code in AFTER_A_KILL or GO_ON in heard.details)
        if self._outage(heard, LEASES) and (lost or again):
            return  # it comes back knowing nothing, and what it left is nobody's until its lease is over
        if heard.code in GATEWAY_GONE and self._outage(heard, AROUND_AN_OUTAGE, killed=True):
            return
        raise Wrong(f"it ended with {heard.code!r}: {heard.details}")

    def _may_be_lost(self, heard: Heard) -> bool:
        """A tail keeps all that was read, for two leases: what is lost with a gateway is what the tail lost, too."""
        if self.forks or heard.last_wait >= 2 * LEASE_SECONDS:
            return True
        read = heard.ended - heard.last_wait - AT_ONCE
        return any(each.began <= heard.ended and read <= each.ended for each in self.losses)

    def _elsewhere(self, heard: Heard) -> tuple[str, ...]:
        """Who cannot see the servers that know a session takes it for a new one, until they see it again."""
        return (ELSEWHERE,) if heard.answer.ask.session and self.gateways > 1 else ()

    def _outage(self, heard: Heard, after: float, *, killed: bool = False) -> bool:
        """Whether a gateway was hurt meanwhile, or shortly before."""
        return any(
            outage.began <= heard.ended
            and heard.began - after <= outage.ended
            and (outage.killed or not killed)
            for outage in self.outages
        )


def most(ask: Ask) -> int:
    """Tokens of an answer that nothing but its length ends."""
    return min(ask.new, TOY_LENGTH - len(ask.prompt))


def describe(heard: Heard) -> str:
    ask = heard.answer.ask
    return (
        f"prompt {len(ask.prompt)}, {len(heard.answer.tokens)} of {len(heard.twin.tokens)} tokens, "
        f"session {ask.session!r}, from {heard.began:.3f} to {heard.ended:.3f} of {time.monotonic():.3f}"
    )
