"""Outlier detection: a throttled server is found, one with long sessions is not ejected; no stream changes."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.models.tiny_models import VOCAB, load_whole, make_toy
from support.processes.kill_scenarios import SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_tokens
from support.processes.streams import Request, Stream
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm.protocol.identity import name_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

pytestmark = pytest.mark.full

LENGTH = 4096  # positions; no stream of a throttled server comes so far
FIND_SECONDS = 120.0  # seconds until a slow server is found, on a busy machine
LONG = 12_000  # tokens of a long prompt
COMPARED_SECONDS = 20.0  # seconds in which a slow server is found
SHORT = 200  # tokens of an answer of a healthy server
READ_ON = 50  # tokens after the ejection
HEAD = 0
SEEDS = itertools.count()


def test_throttled_server_is_ejected_and_its_streams_go_on(tmp_path: Path) -> None:
    """The server sends every heartbeat, and is about twenty times slower than its replica.

    The streams of other servers are replaced by new ones, as those of clients are. Otherwise the sessions of healthy
    servers would soon be much longer, and so would their steps.
    """
    folder = make_toy(tmp_path / "toy", length=LENGTH)
    settings = local_settings("throttled", detects_silence=True)
    with running_swarm(
        folder, "throttled", spans=2, replicas=2, length=LENGTH, settings=settings
    ) as swarm:
        first, *others = [(ask(swarm), newest_head(swarm)) for _ in range(6)]
        slow = first[1]
        kept = [first[0], *(stream for stream, head in others if head == slow)]
        replaced = [stream for stream, head in others if head != slow]
        model, until = load_whole(folder), time.monotonic() + FIND_SECONDS
        with throttled(swarm, name_of(slow)):
            while swarm.ejections("slow") == 0 and time.monotonic() < until:
                replaced = [replace_long(swarm, model, stream) for stream in replaced]
                time.sleep(0.05)
        healths = {server.peer: server.health for server in swarm.view.fetch_snapshot().servers}
        assert healths[slow] == "ejected", healths
        for stream in kept + replaced:
            check_stream(model, stream, stream.count + READ_ON)


@contextmanager
def throttled(swarm: Running, name: str) -> Iterator[None]:
    """Let a server run 5 of every 100 ms. If that is late, it is suspected and compared anew."""
    ended = threading.Event()

    def throttle() -> None:
        while not ended.is_set():
            swarm.local.kill(name, signal.SIGSTOP)
            time.sleep(0.095)
            swarm.local.kill(name, signal.SIGCONT)
            time.sleep(0.005)

    thread = threading.Thread(target=throttle)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def ask(swarm: Running) -> Stream:
    prompt = prompt_of(50, next(SEEDS), VOCAB)
    stream = swarm.start(Request(prompt, LENGTH - len(prompt), SAMPLED))
    stream.wait_tokens(1)
    return stream


def newest_head(swarm: Running) -> str:
    """Return the first server of the session that began last."""
    return swarm.sessions()[-1].route[HEAD].peer


def replace_long(swarm: Running, model: PreTrainedModel, stream: Stream) -> Stream:
    if stream.count < SHORT:
        return stream
    check_stream(model, stream, SHORT)
    return ask(swarm)


def check_stream(model: PreTrainedModel, stream: Stream, count: int) -> None:
    """Read a stream up to `count` tokens; check those."""
    answer = stream.read_and_cancel(count)
    check_contiguous(answer)
    check_tokens(model, answer)


def test_server_with_a_long_session_is_not_ejected(tmp_path: Path) -> None:
    """A session of 12,000 tokens makes steps several times longer than those of the replica, whose sessions are short.

    While heartbeats did not tell what steps read, two servers were ejected within 20 s.
    """
    length = LONG + LENGTH
    folder = make_toy(tmp_path / "toy", length=length)
    settings = local_settings("long", detects_silence=True)
    with running_swarm(
        folder, "long", spans=2, replicas=2, length=length, settings=settings
    ) as swarm:
        long = swarm.start(Request(prompt_of(LONG, next(SEEDS), VOCAB), LENGTH, SAMPLED))
        long.wait_tokens(1)
        short = [ask(swarm) for _ in range(3)]
        model, count = load_whole(folder), long.count
        until = time.monotonic() + COMPARED_SECONDS
        while time.monotonic() < until:
            short = [replace_long(swarm, model, stream) for stream in short]
            time.sleep(0.05)
        assert swarm.ejections("slow") == 0
        assert long.count > count
        for stream in (long, *short):
            check_stream(model, stream, stream.count + READ_ON)
