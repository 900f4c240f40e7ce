"""One run: twins first, then streams and faults, then calm, and then nothing may be left.

Used by `__main__.py` and by the sample in `make test`. A run that finds something wrong says how to see it again, what
happened when, and what the swarm looked like.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from chaos.asks import scripts_of
from chaos.faults import Injector
from chaos.judge import Judge, Tally
from chaos.right import Right, right_by
from chaos.schedule import Fault, schedule
from chaos.streams import Client
from chaos.world import LEASE_SECONDS, Plan, World, world
from swarm.pids import alive, gone_within
from swarm.running import Answer, Ask, metrics, total, wait_until

LONGEST_WAIT = (
    120.0  # seconds for a token: the hold limit, and the start of processes on a busy machine
)
EMPTY_SECONDS = 2 * LEASE_SECONDS + 15.0
GONE_SECONDS = 5.0
LAST_EVENTS = 60
HELD = ("modelswarm_server_sessions", "modelswarm_server_replay_bytes")


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
    new: int = 80  # tokens of an answer, about
    faults: frozenset[Fault] = frozenset(Fault)

    def command(self) -> str:
        """Runs the same schedule again."""
        only = ""
        if self.faults != frozenset(Fault):
            only = f' FAULTS="{" ".join(sorted(self.faults))}"'
        return (
            f"make chaos SECONDS={self.seconds:g} SEED={self.seed} MODEL={self.model} "
            f"STREAMS={self.streams} SPANS={self.spans} GATEWAYS={self.gateways} EVERY={self.every:g}{only}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    options: Options
    tally: Tally
    faults: dict[Fault, int]
    doubled: int  # frames
    truncated: int
    wrong: tuple[str, ...]
    log: tuple[str, ...]
    scene: str  # the swarm, when something was wrong

    def summary(self) -> str:
        tally = self.tally
        waits = sorted(tally.waits) or [0.0]
        p50, p99 = waits[len(waits) // 2], waits[int(0.99 * (len(waits) - 1))]
        return (
            f"{self.options.model}: {sum(self.faults.values())} faults "
            f"({', '.join(f'{count} {fault}' for fault, count in sorted(self.faults.items()))}), "
            f"{self.doubled} frames doubled, {self.truncated} truncated; "
            f"{tally.answers} answers of {tally.tokens} tokens, {tally.left} left, "
            f"{tally.resumed} resumed elsewhere, {tally.refused} refused, "
            f"{tally.begun} ended with an error ({dict(tally.codes)}), {tally.near_ties} near ties; "
            f"longest wait in an answer: median {p50:.2f} s, p99 {p99:.2f} s, most {waits[-1]:.2f} s; "
            f"{len(self.wrong)} wrong"
        )

    def report(self) -> str:
        """For people who have to find out."""
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
    """`folder` holds the toy model. Whatever is wrong is in the outcome."""
    plan = Plan(options.model, options.seed, options.spans, options.replicas, options.gateways)
    right = right_by(options.model, folder)
    with world(folder, plan) as scene:
        say("asking without faults, for what is right")
        run = _Run(options, scene, right, say)
        run.disturb()
        run.calm_down()
    run.nobody_left()
    run.judge.finish()
    return run.outcome()


class _Run:
    """The parts of one run, in the order in which they are called."""

    def __init__(
        self, options: Options, scene: World, right: Right, say: Callable[[str], None]
    ) -> None:
        def calm(ask: Ask) -> Answer:
            answer = scene.running.ask(ask)
            right.check(answer)
            return answer

        self._options, self._scene = options, scene
        scripts = scripts_of(calm, options.seed, options.new)
        events = schedule(
            options.seed,
            options.seconds,
            scene.spans,
            gateways=scene.gateway_names,
            every=options.every,
            faults=options.faults,
        )
        self._injector = Injector(scene, events, tell=say)
        self.judge = Judge(
            LONGEST_WAIT,
            self._injector.gateway_kills,
            right.settle,
            note=lambda at, words: self._injector.note(words, at),
        )
        self._stopping = threading.Event()
        self._clients = [
            Client(
                f"c{i}",
                scene.stubs,
                scene.doors,
                scripts,
                self.judge.hear,
                self._stopping,
                options.seed,
            )
            for i in range(options.streams)
        ]
        self._picture = ""

    def disturb(self) -> None:
        """Something wrong ends it at once: what led to it is then the end of the log."""
        try:
            for client in self._clients:
                client.start()
            self._injector.start()
            until = time.monotonic() + self._options.seconds
            while time.monotonic() < until and not self.judge.wrong:
                time.sleep(0.1)
        finally:
            self._look()
            self._stopping.set()
            self._injector.stop()

    def calm_down(self) -> None:
        """Everybody gets an answer, all servers are back, and nobody holds anything for anybody."""
        until = time.monotonic() + LONGEST_WAIT
        for client in self._clients:
            if not client.join(max(0.0, until - time.monotonic())):
                self.judge.blame(f"{client.name} still waits: {client.doing}")
            elif client.failure is not None:
                self.judge.blame(f"{client.name} failed: {client.failure!r}")
        try:
            self._scene.running.wait_whole()
            self._scene.running.wait_empty(EMPTY_SECONDS)
            wait_until(lambda: not held(self._scene), EMPTY_SECONDS, lambda: str(held(self._scene)))
        except AssertionError as problem:
            self.judge.blame(f"when all was over: {problem}")
        self._look()

    def nobody_left(self) -> None:
        pids = [pid for pid in self._scene.pids if pid]
        if not gone_within(pids, GONE_SECONDS):
            self.judge.blame(f"processes that nobody stopped: {[p for p in pids if alive(p)]}")

    def outcome(self) -> Outcome:
        injector, network = self._injector, self._scene.network
        return Outcome(
            self._options,
            self.judge.tally,
            injector.counts,
            network.doubled,
            network.truncated,
            tuple(self.judge.wrong),
            tuple(str(done) for done in sorted(injector.log, key=lambda done: done.at)),
            self._picture,
        )

    def _look(self) -> None:
        """The first picture after something went wrong shows most."""
        if self.judge.wrong and not self._picture:
            self._picture = look(self._scene, self._clients)


def held(scene: World) -> dict[str, float]:
    """What servers still have of sessions, besides pages: by server and what it is."""
    found = {}
    for member in scene.running.members():
        values = metrics(member.metrics)
        for name in HELD:
            found[f"{member.name}: {name}"] = total(values, name)
    return {what: count for what, count in found.items() if count}


def look(scene: World, clients: list[Client]) -> str:
    """The swarm as it is now, as far as it says anything."""
    lines = [f"{client.name} waits for {client.doing}" for client in clients if client.doing]
    try:
        snapshot = scene.running.view.snapshot()
        lines += [f"session {str(session)!r}" for session in snapshot.sessions]
        lines += [f"server {str(server)!r}" for server in snapshot.servers]
    except Exception as problem:  # it is disturbed, after all
        lines.append(f"the gateway does not say: {problem}")
    for log in sorted(scene.running.local.logs.glob("*.log")):
        lines.append(f"--- {log.name}")
        lines += log.read_text(errors="replace").splitlines()[-12:]
    return "\n".join(lines)
