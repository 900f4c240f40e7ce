"""Carries out a schedule: each event at its time, and whatever has an end is made good again in time.

Used by `run.py`, on a thread of its own. Knows processes and the proxies; what the streams say is not its business.
"""

from __future__ import annotations

import heapq
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from chaos.proxy import Weather
from chaos.schedule import Event, Fault
from chaos.world import World
from swarm.kills import prompt_of
from swarm.models import VOCAB
from swarm.running import Ask, Stream
from swarm.toy import TOY_LENGTH

from modelswarm.errors import ModelSwarmError

STANDS, GOES = 0.15, 0.1  # seconds that a slow disk stops a process, and lets it go on
Heal = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Done:
    """What happened, as the log shows it."""

    at: float  # time.monotonic
    seconds: float  # since the start
    words: str

    def __str__(self) -> str:
        return f"{self.seconds:8.3f} {self.words}"


@dataclass(slots=True)
class Injector:
    """Runs one schedule. `stop` makes everything good and ends it."""

    world: World
    events: Sequence[Event]
    tell: Callable[[str], None] = lambda text: None
    log: list[Done] = field(default_factory=list)
    counts: dict[Fault, int] = field(default_factory=dict)
    gateway_kills: list[float] = field(default_factory=list)  # time.monotonic
    _began: float = 0.0
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _failure: BaseException | None = None

    def start(self) -> None:
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nothing is disturbed any more when it returns."""
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
                self.counts[event.fault] = self.counts.get(event.fault, 0) + 1
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
        """What is over meanwhile ends meanwhile. Returns at `until`, or when there is nothing to wait for."""
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

    # ---- what can be done

    def _do(self, event: Event) -> Heal | None:
        match event.fault:
            case Fault.KILL:
                for name in event.targets:
                    self.world.kill(name)
                return None
            case Fault.GATEWAY_KILL:
                self.gateway_kills.append(time.monotonic())
                self.world.kill(event.targets[0])
                return None
            case Fault.LEAVE:
                self.world.kill(event.targets[0], signal.SIGTERM)
                return None
            case Fault.DRAIN:
                self._drain(event.targets[0])
                return lambda: self._drain(event.targets[0], undo=True)
            case Fault.FREEZE:
                return self._freeze(event.targets[0])
            case Fault.SLOW_DISK:
                return self._slow_disk(event.targets[0])
            case Fault.FULL:
                return self._fill(int(event.amount))
            case Fault.TRUNCATE:
                self.world.network.truncate(*event.targets)
                return None
            case _:
                return self.world.network.disturb(*_weather(event))

    def _drain(self, name: str, *, undo: bool = False) -> None:
        """It goes on when we no longer listen. Refusals are right: the server, or the gateway, may be dead now."""
        try:
            next(self.world.running.view.drain(name, undo=undo), None)
        except ModelSwarmError as refused:
            self.note(f"drain of {name} (undo: {undo}) is refused: {refused}")

    def _freeze(self, name: str) -> Heal:
        """That life of it; if it is killed meanwhile, there is nobody to wake."""
        self.world.kill(name, signal.SIGSTOP)
        return lambda: self.world.kill(name, signal.SIGCONT)

    def _slow_disk(self, name: str) -> Heal:
        """Who waits for a disk (a page of mapped weights, a line of a log) stands still for a moment, again and again:
        that is all that others see of it, and it needs no rights over real disks."""
        over = threading.Event()

        def stutter() -> None:
            while not over.is_set():
                self.world.kill(name, signal.SIGSTOP)
                over.wait(STANDS)
                self.world.kill(name, signal.SIGCONT)
                over.wait(GOES)

        thread = threading.Thread(target=stutter, name="slow disk", daemon=True)
        thread.start()

        def heal() -> None:
            over.set()
            thread.join()

        return heal

    def _fill(self, count: int) -> Heal:
        """Requests that want all positions a session may have: they take the free pages, or are refused."""
        asks = [
            Ask(prompt_of(20, number, VOCAB), TOY_LENGTH - 20 - number) for number in range(count)
        ]
        streams = [self.world.running.start(ask) for ask in asks]

        def heal() -> None:
            for stream in streams:
                Stream.cancel(stream)

        return heal


def _weather(event: Event) -> list[Weather]:
    source, to = event.targets
    match event.fault:
        case Fault.ONE_WAY:
            return [Weather(source, to, blocked=True)]
        case Fault.CUT_OFF:
            return [Weather(source, to, blocked=True), Weather(to, source, blocked=True)]
        case Fault.DELAY:
            return [Weather(source, to, delay=event.amount)]
        case Fault.SLOW_LINK:
            return [Weather(source, to, rate=event.amount)]
        case Fault.DOUBLE:
            return [Weather(source, to, doubled=event.amount)]
        case _:
            raise AssertionError(f"{event.fault} is done elsewhere")
