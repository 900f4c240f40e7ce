"""A pipeline in threads, in a running event loop, under Ctrl-C, and after its end."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.eventually import eventually
from support.processes.streams import ANSWER_SECONDS
from support.processes.swarm import ENDLESS, Running, local_settings, running_swarm

from modelswarm.client.pipeline.errors import AnswerAbortedError
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.opening import pipeline
from modelswarm.client.pipeline.session import Session
from modelswarm.client.pipeline.synchronous import Pipeline
from modelswarm.errors import UserError

SHORT = GenerationConfig(max_new_tokens=20, ignore_eos=True)
LONG = GenerationConfig(max_new_tokens=50_000, ignore_eos=True)
INTERRUPTED = """
import json, sys
from modelswarm.client.pipeline.errors import PipelineInterrupted
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.opening import pipeline

short = GenerationConfig(max_new_tokens=5, ignore_eos=True)
endless = GenerationConfig(max_new_tokens=50_000, ignore_eos=True)
with pipeline(sys.argv[1], max_batch_size=3) as pipe:
    prompts = ["a", "b", "c", "d"]
    try:
        pipe(prompts, [short, endless, short, short], use_tqdm=True)
    except PipelineInterrupted as error:
        stopped = error
    done = [None if each is None else each.text for each in stopped.responses]
    responses = pipe(prompts, short, done=stopped.responses)
    fresh = pipe(prompts, short)
    print(json.dumps([str(stopped), done, [each.text for each in responses], [each.text for each in fresh]]))
"""

STREAM_INTERRUPTED = """
import json, sys
from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.opening import pipeline

short = GenerationConfig(max_new_tokens=5, ignore_eos=True)
endless = GenerationConfig(max_new_tokens=50_000, ignore_eos=True)
with pipeline(sys.argv[1], max_batch_size=3) as pipe:
    prompts = ["a", "b", "c"]
    stream = pipe.stream_infer(prompts, [short, endless, short])
    is_told = False
    try:
        for part in stream:
            if not is_told and sum(each is not None for each in stream.responses) == 2:
                is_told = True
                print("two are done", flush=True)
    except KeyboardInterrupt:
        done = stream.responses
    again = pipe.stream_infer(prompts, short, done=done)
    asked = sorted({part.index for part in again})
    fresh = pipe(prompts, short)
    found = [[each and each.text for each in texts] for texts in (done, again.responses, fresh)]
    print(json.dumps([asked, *found]))
"""


@pytest.fixture(scope="module")
def running(endless_folder: Path) -> Iterator[Running]:
    settings = local_settings("pipestop", hash_model=True)
    with running_swarm(
        endless_folder, "pipestop", spans=2, length=ENDLESS, settings=settings
    ) as made:
        yield made


@pytest.fixture
def pipe(running: Running) -> Iterator[Pipeline]:
    with pipeline(f"http://{running.local.http}", max_batch_size=4) as made:
        yield made


def start_endless(
    running: Running, work: Callable[[], object], errors: list[Exception]
) -> threading.Thread:
    """Start an endless answer in a thread, and return when it runs."""
    before = len(running.sessions())

    def ask() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    eventually("it runs", lambda: len(running.sessions()) > before, explain=running.sessions)
    return thread


def test_ctrl_c_says_what_is_done_and_the_run_goes_on(running: Running) -> None:
    program = [sys.executable, "-c", INTERRUPTED, f"http://{running.local.http}"]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        log = ""
        while "3/4" not in log:  # the progress bar: the short answers have ended
            log += (read := process.stderr.read(1))
            assert read, log
        process.send_signal(signal.SIGINT)
        out, more = process.communicate(timeout=ANSWER_SECONDS)
        log += more

    assert process.returncode == 0, log
    message, done, resumed, fresh = json.loads(out)
    assert message.startswith("interrupted: 3 of 4 prompts are done")
    assert [text is None for text in done] == [False, True, False, False]
    assert resumed == fresh
    running.wait_empty()


def test_interrupted_stream_goes_on_from_what_is_done(running: Running) -> None:
    program = [sys.executable, "-c", STREAM_INTERRUPTED, f"http://{running.local.http}"]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "two are done\n"
        process.send_signal(signal.SIGINT)
        out, log = process.communicate(timeout=ANSWER_SECONDS)

    assert process.returncode == 0, log
    asked, done, whole, fresh = json.loads(out)
    assert (asked, done) == ([1], [fresh[0], None, fresh[2]])
    assert whole == fresh
    running.wait_empty()


def test_pipeline_works_inside_a_running_event_loop(pipe: Pipeline) -> None:
    async def cell() -> int:
        asyncio.get_running_loop()
        parts = list(pipe.stream_infer(["a", "b"], SHORT))
        return pipe("a", SHORT).generate_token_len + len({part.index for part in parts})

    assert asyncio.run(cell()) == 22


def test_threads_share_a_pipeline(pipe: Pipeline) -> None:
    right = pipe([f"prompt {place}" for place in range(12)], SHORT)
    found: dict[int, str] = {}

    def ask(place: int) -> None:
        found[place] = pipe(f"prompt {place}", SHORT).text

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(ANSWER_SECONDS)

    assert [found[place] for place in range(12)] == [response.text for response in right]


def test_left_stream_ends_its_answers(running: Running, pipe: Pipeline) -> None:
    stream = pipe.stream_infer(["a", "b"], LONG)
    next(stream)
    running.wait_session(lambda each: each.state == "running")

    stream.close()

    eventually("no session is left", lambda: not running.sessions(), explain=running.sessions)
    running.wait_empty()


def test_closed_pipeline_ends_its_answers(running: Running) -> None:
    pipe = pipeline(f"http://{running.local.http}")
    errors: list[Exception] = []
    threads = [
        start_endless(running, lambda: pipe("endless", LONG), errors),
        start_endless(running, lambda: list(pipe.stream_infer("endless", LONG)), errors),
    ]

    pipe.close()
    pipe.close()
    for thread in threads:
        thread.join(ANSWER_SECONDS)

    assert [type(error) for error in errors] == [AnswerAbortedError] * 2
    with pytest.raises(UserError, match="closed"):
        pipe("a")
    running.wait_empty()


def test_stream_of_a_closed_pipeline_is_aborted_between_parts(running: Running) -> None:
    pipe = pipeline(f"http://{running.local.http}")
    stream = pipe.stream_infer("endless", LONG)
    next(stream)

    pipe.close()

    with pytest.raises(AnswerAbortedError):
        for _ in stream:  # parts that had come before the end
            pass
    with pytest.raises(UserError, match="closed"):
        pipe.stream_infer("a", SHORT)
    running.wait_empty()


def test_session_runs_one_turn_at_a_time(running: Running, pipe: Pipeline) -> None:
    session = pipe.session(LONG)
    stream = pipe.chat("endless", session, stream_response=True)
    next(stream)

    with pytest.raises(UserError, match="a turn of it is running"):
        pipe.chat("another", session)
    session.abort()
    with pytest.raises(AnswerAbortedError):
        list(stream)

    assert session.history == []
    session.close()
    with pytest.raises(UserError, match="closed"):
        pipe.chat("another", session)
    running.wait_empty()


def test_chat_keeps_its_context_at_the_servers(running: Running, pipe: Pipeline) -> None:
    def ask_twice(session: Session) -> None:
        first = pipe.chat("one", session).response
        assert first is not None and first.cached_tokens == 0
        *_, last = pipe.chat("two", session, stream_response=True)
        assert session.response is not None
        known = first.input_token_len  # the template may write the answer in other tokens
        assert known <= last.cached_tokens == session.response.cached_tokens

    with pipe.session(SHORT) as session:
        ask_twice(session)
        parked = running.wait_session(lambda each: each.state == "parked")
        assert session.response is not None
        length = session.response.input_token_len + session.response.generate_token_len
        assert parked.length == length
        first = session.history
        session.reset()
        ask_twice(session)
        assert session.history == first
        assert [message["role"] for message in session.messages] == ["user", "assistant"] * 2
    running.wait_empty()
