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
from support.chaos.proxy import Weather
from support.chaos.swarm import World
from support.models.tiny_models import TOY_LENGTH, VOCAB
from support.processes.kill_scenarios import prompt_of
from support.processes.streams import Request, Stream
from typing_extensions import override

from modelswarm.errors import ModelSwarmError

STANDS, GOES = 0.15, 0.1  # seconds that a slow disk stops a process, and that it runs in between
LEAVING = 30.0  # seconds that a server may take to stop
Heal = Callable[[], None]


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
    felt: Counter[Fault] = field(default_factory=Counter)  # faults that had an effect
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
        heals: list[tuple[float, int, str, Heal]] = []
        try:
            for number, event in enumerate(self.events):
                self._wait_healing(self._began + event.at, heals)
                if self._stopping.is_set():
                    break
                heal = self._do(event)
                self.note(str(event))
                self.counts[event.fault] += 1
                if heal is not None:
                    over = time.monotonic() + event.seconds
                    heapq.heappush(heals, (over, number, f"over: {event}", heal))
            self._wait_healing(float("inf") if heals else 0.0, heals)
        except BaseException as failure:
            self._failure = failure
        finally:
            for _, _, words, heal in heals:
                heal()
                self.note(words)

    def _wait_healing(self, until: float, heals: list[tuple[float, int, str, Heal]]) -> None:
        """End each fault that is due. Return at `until`, or when there is nothing to wait for."""
        while not self._stopping.is_set():
            now = time.monotonic()
            while heals and heals[0][0] <= now:
                _, _, words, heal = heapq.heappop(heals)
                heal()
                self.note(words)
            if now >= until or (until == float("inf") and not heals):
                return
            due = min(until, heals[0][0] if heals else until)
            self._stopping.wait(max(0.0, due - now))

    # ---- faults

    def _do(self, event: Event) -> Heal | None:
        if len(self.world.gateway_names) > 1 and event.fault in FRAMES:
            self._cut(event)
        if event.fault is Fault.FULL or not set(self.world.spans[-1]).isdisjoint(event.targets):
            self._lose(event)
        match event.fault:
            case Fault.KILL:
                were = [self.world.kill(name) for name in event.targets]
                self._felt(event, any(were))
                return None
            case Fault.GATEWAY_KILL:
                self.outages.append(Outage(time.monotonic(), time.monotonic(), killed=True))
                self._felt(event, self.world.kill(event.targets[0]))
                return None
            case Fault.LEAVE:
                self._felt(event, self.world.kill(event.targets[0], signal.SIGTERM))
                return None
            case Fault.DRAIN:
                self._felt(event, self._drain(event.targets[0]))
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
                return self.world.network.disturb(*_weather(event))

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

    def _felt(self, event: Event, was: bool) -> None:
        self.felt[event.fault] += was

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

    def _freeze(self, event: Event) -> Heal:
        name = event.targets[0]
        self._felt(event, self._stop(name))
        return partial(self._go, name)

    def _stop(self, name: str) -> bool:
        with self._lock:
            self._stopped[name] += 1
            return self.world.kill(name, signal.SIGSTOP)

    def _go(self, name: str) -> None:
        """Resume the process if no other fault stops it. Has no effect if it was killed meanwhile."""
        with self._lock:
            self._stopped[name] -= 1
            if not self._stopped[name]:
                self.world.kill(name, signal.SIGCONT)

    def _slow_disk(self, event: Event) -> Heal:
        """Stop a process for short moments, like one that waits for a slow disk (mapped weights, a log).

        Other processes see no difference, and no real disk is needed.
        """
        over = threading.Event()
        name = event.targets[0]

        def stutter() -> None:
            felt = False
            while not over.is_set():
                felt |= self._stop(name)
                over.wait(STANDS)
                self._go(name)
                over.wait(GOES)
            self._felt(event, felt)

        thread = threading.Thread(target=stutter, name="slow disk", daemon=True)
        thread.start()

        def heal() -> None:
            over.set()
            thread.join()

        return heal

    def _fill(self, event: Event) -> Heal:
        """Send requests for the longest allowed sessions: they take the free pages, or are refused."""
        stub = self.world.stubs[self.world.gateway_names.index(event.targets[0])]
        streams = [
            Stream(stub, Request(prompt_of(20, number, VOCAB), TOY_LENGTH - 20 - number))
            for number in range(int(event.amount))
        ]

        def heal() -> None:
            self._felt(event, any(stream.count for stream in streams))
            for stream in streams:
                Stream.cancel(stream)

        return heal


def _weather(event: Event) -> list[Weather]:
    source, to, *_ = event.targets
    match event.fault:
        case Fault.ONE_WAY:
            return [Weather(source, to, blocked=True, cause=event.fault)]
        case Fault.CUT_OFF | Fault.GATEWAY_CUT_OFF:
            pairs = [(source, other) for other in event.targets[1:]]
            return [
                Weather(*ends, blocked=True, cause=event.fault)
                for pair in pairs
                for ends in (pair, pair[::-1])
            ]
        case Fault.DELAY:
            return [Weather(source, to, delay=event.amount, cause=event.fault)]
        case Fault.SLOW_LINK:
            return [Weather(source, to, rate=event.amount, cause=event.fault)]
        case Fault.DOUBLE:
            return [Weather(source, to, doubled=event.amount, cause=event.fault)]
        case _:
            raise AssertionError(f"{event.fault} is done elsewhere")
