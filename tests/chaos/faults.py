"""Carries out a schedule: each event at its time, and the end of each lasting fault at its time.

Used by `run.py`, on a thread of its own. Knows processes and proxies; does not know the streams.
"""

from __future__ import annotations

import heapq
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from chaos.schedule import FRAMES, Event, Fault
from support.chaos.oracle import Outage
from support.chaos.proxy import LinkFaults
from support.chaos.swarm import World
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.streams import Request, Stream
from typing_extensions import override

from modelswarm.errors import ModelSwarmError

STANDS, GOES = 0.15, 0.1  # seconds that a slow disk stops a process, and that it runs in between
LEAVING = 30.0  # seconds that a server may take to stop
EndFault = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Done:
    """An event that happened, as a line of the log."""

    at: float  # time.monotonic
    seconds: float  # since the start of the run
    words: str

    @override
    def __str__(self) -> str:
        return f"{self.seconds:8.3f} {self.words}"


@dataclass(slots=True)
class Injector:
    """Runs one schedule. `stop` ends all faults and the schedule."""

    world: World
    events: Sequence[Event]
    tell: Callable[[str], None] = lambda text: None
    log: list[Done] = field(default_factory=list)
    counts: Counter[Fault] = field(default_factory=Counter)
    effective: Counter[Fault] = field(default_factory=Counter)  # faults that had an effect
    outages: list[Outage] = field(default_factory=list)
    losses: list[Outage] = field(default_factory=list)  # of the logs that tails keep
    _stopped: Counter[str] = field(
        default_factory=Counter
    )  # number of faults that stop a process now
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _began: float = 0.0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End all faults, and wait for that."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def note(self, words: str, at: float | None = None) -> None:
        at = at or time.monotonic()
        done = Done(at, at - self._began, words)
        self.log.append(done)
        self.tell(str(done))

    def _run(self) -> None:
        ends: list[tuple[float, int, str, EndFault]] = []
        try:
            for number, event in enumerate(self.events):
                self._end_due(self._began + event.at, ends)
                if self._stopping.is_set():
                    break
                end = self._inject(event)
                self.note(str(event))
                self.counts[event.fault] += 1
                if end is not None:
                    over = time.monotonic() + event.seconds
                    heapq.heappush(ends, (over, number, f"over: {event}", end))
            self._end_due(float("inf") if ends else 0.0, ends)
        except BaseException as failure:
            self._failure = failure
        finally:
            for _, _, words, end in ends:
                end()
                self.note(words)

    def _end_due(self, until: float, ends: list[tuple[float, int, str, EndFault]]) -> None:
        """End each fault that is due. Return at `until`, or when there is nothing to wait for."""
        while not self._stopping.is_set():
            now = time.monotonic()
            while ends and ends[0][0] <= now:
                _, _, words, end = heapq.heappop(ends)
                end()
                self.note(words)
            if now >= until or (until == float("inf") and not ends):
                return
            due = min(until, ends[0][0] if ends else until)
            self._stopping.wait(max(0.0, due - now))

    # ---- faults

    def _inject(self, event: Event) -> EndFault | None:
        if len(self.world.gateway_names) > 1 and event.fault in FRAMES:
            self._cut(event)
        if event.fault is Fault.FULL or not set(self.world.spans[-1]).isdisjoint(event.targets):
            self._lose(event)
        match event.fault:
            case Fault.KILL:
                were = [self.world.kill(name) for name in event.targets]
                self._record_effect(event, any(were))
                return None
            case Fault.GATEWAY_KILL:
                self.outages.append(Outage(time.monotonic(), time.monotonic(), killed=True))
                self._record_effect(event, self.world.kill(event.targets[0]))
                return None
            case Fault.LEAVE:
                self._record_effect(event, self.world.kill(event.targets[0], signal.SIGTERM))
                return None
            case Fault.DRAIN:
                self._record_effect(event, self._drain(event.targets[0]))
                return lambda: self._undo_drain(event.targets[0])
            case Fault.GATEWAY_FREEZE:
                began = time.monotonic()
                self.outages.append(Outage(began, began + event.seconds, killed=False))
                return self._freeze(event)
            case Fault.FREEZE:
                return self._freeze(event)
            case Fault.SLOW_DISK:
                return self._slow_disk(event)
            case Fault.FULL:
                return self._fill(event)
            case Fault.TRUNCATE:
                self.world.network.truncate(*event.targets)
                return None
            case _:
                return self.world.network.disturb(*_link_faults(event))

    def _cut(self, event: Event) -> None:
        """Record an outage of a gateway with a faulty link: it may open another session of a name (R20, takeover)."""
        if not set(self.world.gateway_names).isdisjoint(event.targets):
            now = time.monotonic()
            self.outages.append(Outage(now, now + event.seconds, killed=False))

    def _lose(self, event: Event) -> None:
        """Record that a tail was killed, shuts down, or is short of pages and drops those of lost gateways."""
        lasts = {Fault.KILL: 0.0, Fault.LEAVE: LEAVING, Fault.FULL: event.seconds}.get(event.fault)
        if lasts is not None:
            now = time.monotonic()
            self.losses.append(Outage(now, now + lasts, killed=True))

    def _record_effect(self, event: Event, had_effect: bool) -> None:
        self.effective[event.fault] += had_effect

    def _drain(self, name: str, *, undo: bool = False) -> bool:
        """Request a drain, which continues after this call. A refusal is right if the server or gateway was killed."""
        try:
            next(self.world.running.view.drain_server(name, undo=undo), None)
        except ModelSwarmError as refused:
            self.note(f"drain of {name} (undo: {undo}) is refused: {refused}")
            return False
        return True

    def _undo_drain(self, name: str) -> None:
        self._drain(name, undo=True)

    def _freeze(self, event: Event) -> EndFault:
        name = event.targets[0]
        self._record_effect(event, self._stop(name))
        return partial(self._resume, name)

    def _stop(self, name: str) -> bool:
        with self._lock:
            self._stopped[name] += 1
            return self.world.kill(name, signal.SIGSTOP)

    def _resume(self, name: str) -> None:
        """Resume the process if no other fault stops it. Has no effect if it was killed meanwhile."""
        with self._lock:
            self._stopped[name] -= 1
            if not self._stopped[name]:
                self.world.kill(name, signal.SIGCONT)

    def _slow_disk(self, event: Event) -> EndFault:
        """Stop a process for short moments, like one that waits for a slow disk (mapped weights, a log).

        Other processes see no difference, and no real disk is needed.
        """
        over = threading.Event()
        name = event.targets[0]

        def stutter() -> None:
            had_effect = False
            while not over.is_set():
                had_effect |= self._stop(name)
                over.wait(STANDS)
                self._resume(name)
                over.wait(GOES)
            self._record_effect(event, had_effect)

        thread = threading.Thread(target=stutter, name="slow disk", daemon=True)
        thread.start()

        def end() -> None:
            over.set()
            thread.join()

        return end

    def _fill(self, event: Event) -> EndFault:
        """Send requests for the longest allowed sessions: they take the free pages, or are refused."""
        stub = self.world.stubs[self.world.gateway_names.index(event.targets[0])]
        streams = [
            Stream(stub, Request(prompt_of(20, number, VOCAB), TOY_LENGTH - 20 - number))
            for number in range(int(event.amount))
        ]

        def end() -> None:
            self._record_effect(event, any(stream.count for stream in streams))
            for stream in streams:
                Stream.cancel(stream)

        return end


def _link_faults(event: Event) -> list[LinkFaults]:
    source, to, *_ = event.targets
    match event.fault:
        case Fault.ONE_WAY:
            return [LinkFaults(source, to, blocked=True, cause=event.fault)]
        case Fault.CUT_OFF | Fault.GATEWAY_CUT_OFF:
            pairs = [(source, other) for other in event.targets[1:]]
            return [
                LinkFaults(*ends, blocked=True, cause=event.fault)
                for pair in pairs
                for ends in (pair, pair[::-1])
            ]
        case Fault.DELAY:
            return [LinkFaults(source, to, delay=event.amount, cause=event.fault)]
        case Fault.SLOW_LINK:
            return [LinkFaults(source, to, rate=event.amount, cause=event.fault)]
        case Fault.DOUBLE:
            return [LinkFaults(source, to, doubled=event.amount, cause=event.fault)]
        case _:
            raise AssertionError(f"{event.fault} is done elsewhere")
