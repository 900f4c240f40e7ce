"""Clients that keep a swarm busy: each plays one script after the other until it is stopped.

A refusal before the first token is tried again. An answer that ended with an error is given up. Now and then a client
cancels in the middle. Every request ends as an `Observation` for the oracle.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import grpc
from support.chaos.requests import Script
from support.chaos.resuming_client import Reader
from support.processes.streams import Answer, Stream

from modelswarm.protocol.wire import api_pb2_grpc

LOSES_INTEREST = 0.08  # of requests
RESUMES = 0.4  # of requests, where there are several gateways
PAUSE = 0.1  # seconds after a refusal


@dataclass(frozen=True, slots=True)
class Observation:
    """One request to its end."""

    who: str
    answer: Answer  # the received part
    twin: Answer
    began: float  # time.monotonic, as `ended`
    ended: float
    code: str = ""  # `error-code` of its end, else gRPC's own; empty: no error
    details: str = ""
    left: bool = False  # the client cancelled it
    longest_wait: float = 0.0  # seconds between two tokens, or before the first
    last_wait: float = 0.0  # from the last token to the end
    waited_until: float = 0.0  # time.monotonic at the end of the longest wait
    breaks: int = 0  # broken connections, each resumed at some gateway
    torn: int = 0  # of these, after the first token
    asked: float = 0.0  # time.monotonic of the first attempt, before any refusal


@dataclass(frozen=True, slots=True)
class _Reply:
    answer: Answer
    times: Sequence[float]  # time.perf_counter
    code: str = ""
    details: str = ""
    left: bool = False
    breaks: int = 0
    torn: int = 0


@dataclass(slots=True)
class Client:
    """Plays scripts on a thread. With `home`, all its answers begin at that target, and each broken one is resumed."""

    name: str
    stubs: Sequence[api_pb2_grpc.InferenceStub]  # each request goes to a random one
    targets: Sequence[str]  # HTTP addresses; none: no answer is resumed
    scripts: Sequence[Script]
    observe: Callable[[Observation], None]
    stopping: threading.Event
    seed: int
    home: str = ""
    _talks: int = 0
    _patient: bool = False  # never cancels
    _thread: threading.Thread | None = None
    failure: BaseException | None = None
    doing: str = ""
    _rng: random.Random = field(default_factory=random.Random)

    def start(self) -> None:
        self._rng.seed(f"{self.seed}/{self.name}")
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._thread.start()

    def play_once(self) -> None:
        """Play each script once, to its end."""
        self._patient = True
        self._thread = threading.Thread(target=self._play_all, name=self.name, daemon=True)
        self._thread.start()

    def _play_all(self) -> None:
        try:
            for script in self.scripts:
                self._play(script)
        except BaseException as failure:
            self.failure = failure

    def join(self, seconds: float) -> bool:
        """Return True if the client has ended within so many seconds."""
        assert self._thread is not None
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self.stopping.is_set():
                self._play(self._rng.choice(self.scripts))
        except BaseException as failure:
            self.failure = failure

    def _play(self, script: Script) -> None:
        session = ""
        if len(script.requests) > 1:
            self._talks += 1
            session = f"{self.name}-{self._talks}"
        for request, twin in zip(script.requests, script.twins, strict=True):
            observation = self._ask(replace(twin, request=replace(request, session=session)))
            if observation is None or observation.code or observation.left:
                return

    def _ask(self, twin: Answer) -> Observation | None:
        """Repeat a refused request until it is accepted; None if that does not happen before the end of the run."""
        asked = time.monotonic()
        while True:
            observation = replace(self._once(twin), asked=asked)
            self.observe(observation)
            if not observation.code or observation.answer.tokens:
                return observation
            if self.stopping.wait(PAUSE):
                return None

    def _once(self, twin: Answer) -> Observation:
        began, clock = time.monotonic(), time.perf_counter()
        resumes = bool(self.home) or (bool(self.targets) and self._rng.random() < RESUMES)
        self.doing = (
            f"{len(twin.request.prompt)} + {twin.request.new} {twin.request.session} {resumes}"
        )
        reply = self._resuming(twin) if resumes else self._called(twin)
        self.doing = ""
        times = [clock, *reply.times, time.perf_counter()]
        waits = [b - a for a, b in pairwise(times)]
        longest = max(waits)
        return Observation(
            who=self.name,
            answer=reply.answer,
            twin=twin,
            began=began,
            ended=time.monotonic(),
            code=reply.code,
            details=reply.details,
            left=reply.left,
            longest_wait=longest,
            last_wait=waits[-1],
            waited_until=began + times[waits.index(longest) + 1] - clock,
            breaks=reply.breaks,
            torn=reply.torn,
        )

    def _called(self, twin: Answer) -> _Reply:
        """Send the request over gRPC."""
        stream = Stream(self._rng.choice(self.stubs), twin.request)
        bored = not self._patient and self._rng.random() < LOSES_INTEREST
        left = bored and self._leave(stream, len(twin.tokens))
        answer, error = stream.received()
        left = left and not answer.finish  # otherwise the answer ended first
        code, details = ("", "") if error is None or left else code_of(error)
        return _Reply(answer, stream.times, code, details, left)

    def _resuming(self, twin: Answer) -> _Reply:
        """Send the request over HTTP in a named session, and resume it after breaks."""
        request = twin.request
        if not request.session:
            self._talks += 1
            request = replace(request, session=f"{self.name}-{self._talks}")
        reader = Reader(self.targets, request, self._rng, self.home)
        reader.read()
        return _Reply(
            reader.answer(),
            reader.times,
            reader.code,
            reader.details,
            breaks=reader.breaks,
            torn=reader.torn,
        )

    def _leave(self, stream: Stream, length: int) -> bool:
        """Cancel in the middle of the answer; return False if it ended before."""
        wanted = self._rng.randrange(1, max(2, length))
        while not stream.done and stream.count < wanted:
            time.sleep(0.02)
        if stream.done:
            return False
        stream.cancel()
        return True


def code_of(error: grpc.RpcError) -> tuple[str, str]:
    call: grpc.Call = error  # type: ignore[assignment]  # every error of a call is one
    trailing = dict(call.trailing_metadata() or ())
    return str(trailing.get("error-code", call.code().name)), call.details() or ""
