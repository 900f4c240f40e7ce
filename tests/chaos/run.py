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
from chaos.schedule import Fault, schedule
from chaos.streams import Client
from chaos.world import LEASE_SECONDS, Plan, World, world
from swarm.pids import alive
from swarm.running import Answer

LONGEST_WAIT = 75.0  # seconds for a token, the hold included
EMPTY_SECONDS = 2 * LEASE_SECONDS + 15.0
GONE_SECONDS = 5.0
LAST_EVENTS = 60


@dataclass(frozen=True, slots=True)
class Options:
    model: str = "hash"
    seconds: float = 30.0
    seed: int = 1
    streams: int = 8
    spans: int = 2
    replicas: int = 2
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
            f"STREAMS={self.streams} SPANS={self.spans} EVERY={self.every:g}{only}"
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    options: Options
    tally: Tally
    faults: dict[Fault, int]
    reroutes: int
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
            f"{self.reroutes} reroutes, {self.doubled} frames doubled, {self.truncated} truncated; "
            f"{tally.answers} answers of {tally.tokens} tokens, {tally.left} left, {tally.refused} refused, "
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
    plan = Plan(options.model, options.seed, options.spans, options.replicas)
    settle = None if options.model == "hash" else settler(folder)
    with world(folder, plan) as scene:
        say("asking without faults, for what is right")
        scripts = scripts_of(scene.running, options.seed, options.new)
        events = schedule(
            options.seed, options.seconds, scene.spans, every=options.every, faults=options.faults
        )
        injector = Injector(scene, events, tell=say)
        judge = Judge(LONGEST_WAIT, injector.gateway_kills, settle)
        stopping = threading.Event()
        clients = [
            Client(f"c{i}", scene.running, scripts, judge.hear, stopping, options.seed)
            for i in range(options.streams)
        ]
        picture = ""
        try:
            for client in clients:
                client.start()
            injector.start()
            _wait(options.seconds, judge)
        finally:
            picture = look(scene, clients) if judge.wrong else ""
            injector.stop()
            stopping.set()
        _all_end(clients, judge)
        picture = picture or (look(scene, clients) if judge.wrong else "")
        reroutes = scene.running.faults().reroutes
        _nothing_held(scene, judge)
    _nobody_left(scene, judge)
    judge.finish()
    return Outcome(
        options,
        judge.tally,
        injector.counts,
        reroutes,
        scene.network.doubled,
        scene.network.truncated,
        tuple(judge.wrong),
        tuple(str(done) for done in injector.log),
        picture,
    )


def settler(folder: Path) -> Callable[[Answer, Answer], None]:
    """Oracles 2 and 3 on the whole model."""
    import torch
    from swarm.models import load_whole
    from swarm.oracles import check_tokens, check_twins

    torch.set_num_threads(1)
    model = load_whole(folder)

    def settle(twin: Answer, answer: Answer) -> None:
        check_tokens(model, answer)
        if answer.finish:
            check_twins(model, twin, answer)

    return settle


def _wait(seconds: float, judge: Judge) -> None:
    """Something wrong ends the run at once: what led to it is then the end of the log."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and not judge.wrong:
        time.sleep(0.1)


def _all_end(clients: list[Client], judge: Judge) -> None:
    until = time.monotonic() + LONGEST_WAIT
    for client in clients:
        if not client.join(max(0.0, until - time.monotonic())):
            judge.blame(f"{client.name} still waits: {client.doing}")
        elif client.failure is not None:
            judge.blame(f"{client.name} failed: {client.failure!r}")


def _nothing_held(scene: World, judge: Judge) -> None:
    """All servers are back, and hold nothing for anybody."""
    try:
        scene.running.wait_whole()
        scene.running.wait_empty(EMPTY_SECONDS)
    except AssertionError as problem:
        judge.blame(f"when all was over: {problem}")


def _nobody_left(scene: World, judge: Judge) -> None:
    until = time.monotonic() + GONE_SECONDS
    while (left := [pid for pid in scene.pids if pid and alive(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    if left:
        judge.blame(f"processes that nobody stopped: {left}")


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
