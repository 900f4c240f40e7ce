"""A running swarm as tests see it: real processes of a small model, streams of token ids through the gateway's gRPC
door, and kills.

Used by the tests that kill and that compare with transformers. `LocalSwarm` runs the processes, exactly as `up` does;
this adds what tests ask of it. What is right is not known here: see `oracles.py`.
"""

from __future__ import annotations

import os
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from modelswarm.client.swarm import SwarmDoor, SwarmDoorError
from modelswarm.local.commands import LocalSettings
from modelswarm.local.members import Member
from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm
from modelswarm.protocol.identity import name_of
from modelswarm.protocol.messages import Sampling, Trouble
from modelswarm.protocol.wire import api_pb2, api_pb2_grpc
from modelswarm.resources.loading import parse_document

MODEL = "toy"
READY_SECONDS = 120.0  # for processes to start; the machine may be busy
ANSWER_SECONDS = 120.0
LOOK_SECONDS = 0.003
PAGES = "modelswarm_server_kv_pages"
COUNTED_SECONDS = 0.15  # after this, a server's metrics show at least what was true before it
REPORTED = tuple(trouble.value for trouble in Trouble if trouble is not Trouble.OVERDUE)
"""Causes of faults that somebody tells of. All others are read off a clock: where a server stands still for want of a
processor, its gateway is right to leave it, and a test that broke nothing sees a fault."""
_CALM_TRIES = 4  # the machine may stand still in some of them


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. It runs to `new` tokens unless a stop string or one of `sampling.eos` ends it."""

    prompt: tuple[int, ...]
    new: int
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    session: str = ""
    model: str = MODEL

    def message(self) -> api_pb2.GenerateRequest:
        wanted = self.sampling
        return api_pb2.GenerateRequest(
            model=self.model,
            tokens=api_pb2.TokenIds(ids=self.prompt),
            max_tokens=self.new,
            sampling=api_pb2.Sampling(
                temperature=wanted.temperature,
                top_p=wanted.top_p,
                top_k=wanted.top_k,
                min_p=wanted.min_p,
                repetition_penalty=wanted.repetition_penalty,
                seed=wanted.seed,
            ),
            stop=self.stop,
            session_id=self.session,
            ignore_eos=not wanted.eos,
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """All that one request was given."""

    ask: Ask
    tokens: tuple[int, ...]
    positions: tuple[int, ...]  # of every token, in the session's log
    text: str
    finish: str

    @property
    def log(self) -> list[int]:
        return [*self.ask.prompt, *self.tokens]


class Stream:
    """A request under way, read by a thread of its own."""

    def __init__(self, stub: api_pb2_grpc.InferenceStub, ask: Ask) -> None:
        self.ask = ask
        self._parts: list[api_pb2.GenerateResponse] = []
        self.times: list[float] = []  # by `perf_counter`, of every part that brought tokens
        self._error: grpc.RpcError | None = None
        self._done = False
        self._changed = threading.Condition()
        self._call = stub.GenerateStream(ask.message(), timeout=ANSWER_SECONDS)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for part in self._call:
                with self._changed:
                    self._parts.append(part)
                    if part.token_ids:
                        self.times.append(time.perf_counter())
                    self._changed.notify_all()
        except grpc.RpcError as error:
            self._error = error
        with self._changed:
            self._done = True
            self._changed.notify_all()

    @property
    def count(self) -> int:
        """Tokens that have come."""
        with self._changed:
            return sum(len(part.token_ids) for part in self._parts)

    @property
    def done(self) -> bool:
        with self._changed:
            return self._done

    def wait_tokens(self, count: int) -> None:
        """Until so many tokens have come; the stream must not end before."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._done or sum(len(part.token_ids) for part in self._parts) >= count,
                ANSWER_SECONDS,
            )
        assert self.count >= count, f"{self.count} tokens came: {self._error}"

    def cancel(self) -> None:
        """As a client does that loses interest."""
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._thread.join()

    def answer(self) -> Answer:
        """All of it; raises the grpc.RpcError that ended it."""
        heard, error = self.heard()
        if error is not None:
            raise error
        return heard

    def heard(self) -> tuple[Answer, grpc.RpcError | None]:
        """What came until it ended, and the error that ended it, if one did."""
        self._thread.join()
        parts = self._parts
        answer = Answer(
            ask=self.ask,
            tokens=tuple(token for part in parts for token in part.token_ids),
            positions=tuple(
                part.position + index for part in parts for index in range(len(part.token_ids))
            ),
            text="".join(part.text for part in parts),
            finish=parts[-1].finish_reason if parts else "",
        )
        return answer, self._error


@dataclass(frozen=True, slots=True)
class Faults:
    """What the gateway has counted so far."""

    reroutes: int  # faults that sent a session in a turn into the loop
    resumed: int  # sessions that had a fault and went on to their next token
    told: int  # of the reroutes, those whose cause was reported
    mended: int  # of the resumed, those whose first cause was

    @property
    def silences(self) -> int:
        """Faults that nobody told of, and recoveries that began with one."""
        return self.reroutes - self.told + self.resumed - self.mended


class Running:
    """One swarm with its doors."""

    def __init__(self, local: LocalSwarm) -> None:
        self.local = local
        self.view = SwarmDoor(local.grpc)
        self._channel = grpc.insecure_channel(local.grpc)
        self._stub = api_pb2_grpc.InferenceStub(self._channel)
        self._calm: dict[Ask, Answer] = {}

    def close(self) -> None:
        self._channel.close()
        self.view.__exit__(None, None, None)

    # ---- streams

    def start(self, ask: Ask) -> Stream:
        return Stream(self._stub, ask)

    def ask(self, ask: Ask) -> Answer:
        return self.start(ask).answer()

    def ask_all(self, asks: Sequence[Ask]) -> list[Answer]:
        """All at once."""
        return [stream.answer() for stream in [self.start(ask) for ask in asks]]

    def calm(self, ask: Ask) -> Answer:
        """What this ask gets when nobody is killed and no server stands still; asked once."""
        if ask not in self._calm:
            self._calm[ask] = self._undisturbed(ask)
        return self._calm[ask]

    def _undisturbed(self, ask: Ask) -> Answer:
        for _ in range(_CALM_TRIES):
            self.wait_whole()
            before = self.faults()
            answer = self.ask(ask)
            after = self.faults()
            assert after.told == before.told, "the undisturbed run was disturbed"
            if after == before:
                return answer
        raise AssertionError(f"a server seemed silent in each of {_CALM_TRIES} undisturbed runs")

    # ---- what there is

    def sessions(self) -> list[api_pb2.Session]:
        return list(self.view.snapshot().sessions)

    def only_session(self) -> api_pb2.Session:
        found = self.sessions()
        assert len(found) == 1, found
        return found[0]

    def wait_session(self, suits: Callable[[api_pb2.Session], bool]) -> api_pb2.Session:
        """Until the only session there is looks as wanted."""
        found: list[api_pb2.Session] = []

        def seen() -> bool:
            found[:] = [session for session in self.sessions() if suits(session)]
            return bool(found)

        wait_until(seen, ANSWER_SECONDS, "no session came to look as wanted")
        return found[0]

    def faults(self) -> Faults:
        values = metrics(self.local.metrics)
        reported = [f'cause="{cause}"' for cause in REPORTED]
        reroutes, resumed = "modelswarm_gateway_reroutes_total", 'outcome="resumed"'
        recoveries = "modelswarm_gateway_recoveries_total"
        return Faults(
            reroutes=int(total(values, reroutes)),
            resumed=int(total(values, recoveries, resumed)),
            told=int(sum(total(values, reroutes, cause) for cause in reported)),
            mended=int(sum(total(values, recoveries, resumed, cause) for cause in reported)),
        )

    def members(self) -> list[Member]:
        return [server.member for server in self.local.servers if server.member is not None]

    def rows(self, name: str = "") -> dict[str, int]:
        """How many rows each server, or only that one, has run through its blocks."""
        return {
            member.name: int(total(metrics(member.metrics), "modelswarm_server_rows_total"))
            for member in self.members()
            if name in ("", member.name)
        }

    def pages_in_use(self) -> dict[str, int]:
        """By server; those that use none are left out, but not one that has not counted its pages yet."""
        used = {}
        for member in self.members():
            values = metrics(member.metrics)
            every = total(values, PAGES)
            given = every - total(values, PAGES, 'state="free"')
            if given or every == 0:
                used[member.name] = int(given)
        return used

    # ---- kills

    def kill(self, peer: str) -> None:
        """SIGKILL; its supervisor starts another one in its place."""
        name = name_of(peer)
        alive = {member.peer for member in self.members()}
        assert peer in alive, f"{peer} is not alive"
        self.local.kill(name)

    def wait_whole(self) -> None:
        """Until every server serves and the gateway is linked to all of them, and no old one."""

        def whole() -> bool:
            try:
                linked = {server.peer for server in self.view.snapshot().servers}
            except SwarmDoorError:
                return (
                    False  # the gateway was killed, too, and its channel has not noticed its return
                )
            alive = {member.peer for member in self.members()}
            return linked == alive and len(alive) == len(self.local.slots)

        ready = self.local.wait_ready(READY_SECONDS)
        assert ready, f"not all serve: {[server.job for server in self.local.servers]}"
        wait_until(whole, READY_SECONDS, "the swarm did not become whole again")

    def wait_empty(self, seconds: float = 10.0) -> None:
        """Until no server holds a page for anybody."""
        time.sleep(COUNTED_SECONDS)
        wait_until(lambda: not self.pages_in_use(), seconds, lambda: f"{self.pages_in_use()}")


@contextmanager
def running_swarm(
    folder: Path, name: str, *, spans: int, replicas: int = 1, sessions: int = 10, length: int = 1024,
    settings: LocalSettings | None = None,
) -> Iterator[Running]:  # fmt: skip
    """A swarm of the model in `folder`, ready; no two of one test run have the same `name`."""
    document = f"""
apiVersion: modelswarm.io/v1alpha1
kind: ModelSwarm
metadata: {{name: {name}}}
spec:
  model: {{source: "file://{folder}", servedName: {MODEL}}}
  spans: {{count: {spans}}}
  replicas: {replicas}
  sessions: {{maxLength: {length}, concurrent: {sessions}}}
"""
    plan = plan_document(parse_document(document, name))
    with LocalSwarm(plan, settings or local_settings(name)) as local:
        running = Running(local)
        try:
            wait_until(
                lambda: any(model.ready for model in running.view.snapshot().models),
                READY_SECONDS,
                "the model did not become ready",
            )
            running.wait_whole()
            yield running
        finally:
            running.close()
        local.check()


def local_settings(
    name: str,
    *,
    hash_model: bool = False,
    lease: float | None = None,
    token_budget: int | None = None,
) -> LocalSettings:
    """Dead servers come back at once: a test kills many."""
    return LocalSettings(
        publish=False,
        run_name=f"test-{name}-{os.getpid()}",  # another test run may be on
        threads=1,
        hash_model=hash_model,
        lease=lease,
        token_budget=token_budget,
        restart_limit=0.1,
    )


def wait_until(
    condition: Callable[[], bool], seconds: float, problem: str | Callable[[], str]
) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(problem if isinstance(problem, str) else problem())
        time.sleep(LOOK_SECONDS)


def metrics(target: str) -> dict[str, float]:
    """What a process tells Prometheus: sample with its labels -> value."""
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    samples = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in samples}


def total(values: dict[str, float], name: str, *labels: str) -> float:
    """The sum of a metric's samples that have these labels, each as `name="value"`."""
    return sum(
        value
        for sample, value in values.items()
        if sample.partition("{")[0] == name and all(label in sample for label in labels)
    )
