"""One run: reference answers first, then streams under faults, then a check that nothing is left.

Used by `__main__.py` and by the sample in `make test`. A run with violations reports the command that repeats it, the
log of events, and the state of the swarm.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

from chaos.faults import Injector
from chaos.schedule import FRAMES, LEASE_SECONDS, Fault, schedule
from support.chaos.clients import Client
from support.chaos.oracle import Oracle, Tally
from support.chaos.reference import Right, right_by
from support.chaos.requests import scripts_of
from support.chaos.snapshot import held, look, loops
from support.chaos.swarm import Plan, World, world
from support.chaos.waiting_bounds import forks, longest_wait
from support.eventually import eventually
from support.processes.server import gone_within, group_alive
from support.processes.streams import Answer, Request

LAST_ANSWERS = 120.0  # seconds for the answers that still run when the faults end
EMPTY_SECONDS = 2 * LEASE_SECONDS + 15.0
GONE_SECONDS = 5.0
CALM_SECONDS = 60.0  # seconds until every request is answered after the last fault
RARE = 6  # a fault that came this often must have had an effect
LAST_EVENTS = 60


@dataclass(frozen=True, slots=True)
class Options:
    model: str = "hash"
    seconds: float = 30.0
    seed: int = 1
    streams: int = 8
    spans: int = 2
    replicas: int = 2
    gateways: int = 1
    every: float = 1.5  # seconds between two faults, on average
    new: int = 80  # approximate tokens of an answer
    faults: frozenset[Fault] = frozenset(Fault)
    each: bool = False  # every fault comes before any repeats

    def command(self) -> str:
        """Return the command that repeats this run: the same schedule, swarm and load."""
        values = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("faults", "each")
        }
        words = [f"{name.upper()}={value}" for name, value in values.items()]
        words += ["EACH=1"] if self.each else []
        if self.faults != frozenset(Fault):
            words.append(f'FAULTS="{" ".join(sorted(self.faults))}"')
        return " ".join(["make chaos", *words])


@dataclass(frozen=True, slots=True)
class Outcome:
    options: Options
    tally: Tally
    faults: Counter[Fault]
    effective: Counter[Fault]  # faults that had an effect; for links: the affected frames
    loops: dict[str, int]  # of running gateways: causes of re-routes
    wrong: tuple[str, ...]
    log: tuple[str, ...]
    scene: str  # state of the swarm at the first violation

    def summary(self) -> str:
        tally = self.tally
        waits = sorted(tally.waits) or [0.0]
        p50, p99 = waits[len(waits) // 2], waits[int(0.99 * (len(waits) - 1))]
        return (
            f"{self.options.model}: {sum(self.faults.values())} faults "
            f"({', '.join(self._counts_of(fault) for fault in sorted(self.faults))}); "
            f"why sessions looked for a route: {self.loops}; "
            f"{tally.answers} answers of {tally.tokens} tokens, {tally.left} left, "
            f"{tally.resumed} of {tally.torn} that broke off went on, {tally.refused} refused, "
            f"{tally.begun} ended with an error ({dict(tally.codes)}), {tally.near_ties} near ties; "
            f"longest wait in an answer: median {p50:.2f} s, p99 {p99:.2f} s, most {waits[-1]:.2f} s; "
            f"{len(self.wrong)} wrong"
        )

    def _counts_of(self, fault: Fault) -> str:
        unit = "frames" if fault in FRAMES else "with an effect"
        return f"{self.faults[fault]} {fault}: {self.effective[fault]} {unit}"

    def report(self) -> str:
        """Return violations, the end of the log, the state of the swarm, and the command to repeat the run."""
        return "\n".join(
            [
                *(f"WRONG {words}" for words in self.wrong),
                "what happened (the last of it):",
                *self.log[-LAST_EVENTS:],
                self.scene,
                f"again: {self.options.command()}",
            ]
        )


def chaos(
    options: Options, folder: Path, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """Run once, with the toy model in `folder`. All violations are in the outcome."""
    plan = Plan(options.model, options.seed, options.spans, options.replicas, options.gateways)
    right = right_by(options.model, folder)
    with world(folder, plan) as scene:
        say("asking without faults, for what is right")
        run = _Run(options, scene, right, say)
        run.disturb()
        run.calm_down()
    run.check_processes_ended()
    run.check_faults_had_effect()
    run.check_streams_resumed()
    run.oracle.finish()
    return run.outcome()


class _Run:
    """The parts of one run, in the order in which they are called."""

    def __init__(
        self, options: Options, scene: World, right: Right, say: Callable[[str], None]
    ) -> None:
        def calm(request: Request) -> Answer:
            answer = scene.running.ask(request)
            right.check(answer)
            return answer

        self._options, self._scene = options, scene
        self._loops: dict[str, int] = {}
        self._scripts = scripts = scripts_of(calm, options.seed, options.new)
        events = schedule(
            options.seed,
            options.seconds,
            scene.spans,
            gateways=scene.gateway_names,
            every=options.every,
            faults=options.faults,
            each=options.each,
        )
        self._injector = Injector(scene, events, tell=say)
        self.oracle = Oracle(
            longest_wait(events, scene.spans, scene.gateway_names, scene.plan.hold_seconds),
            self._injector.outages,
            right.settle,
            options.gateways,
            losses=self._injector.losses,
            forks=forks(events, scene.spans, scene.gateway_names),
            note=lambda at, words: self._injector.note(words, at),
        )
        self._stopping = threading.Event()
        targets = (
            scene.http_targets
        )  # half of the clients resume every broken stream, equally many at each
        self._clients = [
            Client(
                f"c{i}",
                scene.stubs,
                targets,
                scripts,
                self.oracle.observe,
                self._stopping,
                options.seed,
                home=targets[i // 2 % len(targets)] if targets and i % 2 else "",
            )
            for i in range(options.streams)
        ]
        self._picture = ""

    def disturb(self) -> None:
        """Run clients and faults. A violation ends them at once, so that its causes are at the end of the log."""
        try:
            for client in self._clients:
                client.start()
            self._injector.start()
            until = time.monotonic() + self._options.seconds
            while time.monotonic() < until and not self.oracle.wrong:
                time.sleep(0.1)
        finally:
            self._look()
            self._stopping.set()
            self._injector.stop()

    def calm_down(self) -> None:
        """Check that every client gets an answer, all servers are back, and no process holds a session."""
        until = time.monotonic() + LAST_ANSWERS
        for client in self._clients:
            if not client.join(max(0.0, until - time.monotonic())):
                self.oracle.fail(f"{client.name} still waits: {client.doing}")
            elif client.failure is not None:
                self.oracle.fail(f"{client.name} failed: {client.failure!r}")
        try:
            self._scene.running.wait_whole()
            self._ask_again()
            self._loops = loops(self._scene)
            self._scene.running.wait_empty(EMPTY_SECONDS)
            eventually(
                "gateways keep no session",
                lambda: not held(self._scene),
                EMPTY_SECONDS,
                lambda: held(self._scene),
            )
        except AssertionError as problem:
            self.oracle.fail(f"when all was over: {problem}")
        self._look()

    def _ask_again(self) -> None:
        """Send each script to every gateway once more; all requests are answered."""
        self._stopping.clear()
        last = [
            Client(
                f"after-{number}", [stub], (), [script], self.oracle.observe, self._stopping, number
            )
            for number, (stub, script) in enumerate(product(self._scene.stubs, self._scripts))
        ]
        for client in last:
            client.play_once()
        until = time.monotonic() + CALM_SECONDS
        late = [client for client in last if not client.join(max(0.0, until - time.monotonic()))]
        self._stopping.set()
        assert not late, f"no answer in {CALM_SECONDS:g} s: {[client.doing for client in late]}"
        failed = [client.failure for client in last if client.failure is not None]
        assert not failed, failed

    def check_processes_ended(self) -> None:
        """Check that no process or child is left: each process began a group of its own."""
        pids = [pid for pid in self._scene.pids if pid]
        if not gone_within(pids, GONE_SECONDS, group_alive):
            left = [pid for pid in pids if group_alive(pid)]
            self.oracle.fail(f"processes that were not stopped: groups {left}")

    def check_faults_had_effect(self) -> None:
        """Check that each frequent fault had an effect at least once.

        With `each`, all faults must come, and every one must have an effect. A fault without an effect tests nothing.
        """
        counts, effective, each = self._injector.counts, self._effective(), self._options.each
        for fault, count in counts.items():
            if (each or count >= RARE) and not effective[fault]:
                self.oracle.fail(f"{count} times {fault}, without any effect")
        missing = self._options.faults - counts.keys()
        if each and missing and not self.oracle.wrong:  # a violation ends the run early
            self.oracle.fail(f"never injected: {sorted(missing)}")

    def check_streams_resumed(self) -> None:
        """Check that most streams of lost gateways were resumed at others: it fails only if the tail is lost, too."""
        torn, resumed = self.oracle.tally.torn, self.oracle.tally.resumed
        if torn >= RARE and 2 * resumed < torn:
            self.oracle.fail(f"{torn} answers broke off, and only {resumed} went on")

    def _effective(self) -> Counter[Fault]:
        network = self._scene.network
        frames = {fault: network.affected[fault] for fault in FRAMES}
        frames |= {Fault.DOUBLE: network.doubled, Fault.TRUNCATE: network.truncated}
        return self._injector.effective + Counter(frames)

    def outcome(self) -> Outcome:
        injector = self._injector
        return Outcome(
            self._options,
            self.oracle.tally,
            injector.counts,
            self._effective(),
            self._loops,
            tuple(self.oracle.wrong),
            tuple(str(done) for done in sorted(injector.log, key=lambda done: done.at)),
            self._picture,
        )

    def _look(self) -> None:
        """Keep the state of the swarm at the first violation."""
        if self.oracle.wrong and not self._picture:
            self._picture = look(self._scene, self._clients)
