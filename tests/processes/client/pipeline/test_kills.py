"""Batches, streams and chats of a pipeline while servers and gateways are killed: no token changes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from support.eventually import eventually
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.oracles import check_hash
from support.processes.streams import ANSWER_SECONDS, Answer, Request
from support.processes.swarm import ENDLESS, Running, local_settings, running_swarm

from modelswarm.client.pipeline.generation_config import GenerationConfig
from modelswarm.client.pipeline.opening import pipeline
from modelswarm.client.pipeline.synchronous import Pipeline
from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.protocol.messages import Sampling

NEW = 600  # enough for both kills before the last answers end
CONFIG = GenerationConfig(max_new_tokens=NEW, ignore_eos=True)


@pytest.fixture(scope="module")
def running(endless_folder: Path) -> Iterator[Running]:
    settings = local_settings("pipekills", hash_model=True, token_budget=8)
    with running_swarm(
        endless_folder, "pipekills", spans=2, replicas=2, length=ENDLESS, settings=settings
    ) as made:
        yield made


@pytest.fixture
def pipe(running: Running) -> Iterator[Pipeline]:
    running.wait_whole()
    with pipeline(f"http://{running.local.http}", max_batch_size=6) as made:
        yield made


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(1, VOCAB) for _ in range(rng.randrange(2, 40))] for _ in range(count)]


def check(prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling, end: str) -> None:
    """Check all tokens of an answer, and its end."""
    request = Request(tuple(prompt), NEW, sampling)
    answer = Answer(request, tuple(tokens), (), "", end)
    assert len(tokens) == NEW
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=ENDLESS)


def kill_during(running: Running, work: Callable[[], object]) -> None:
    """Run the work in a thread; meanwhile kill the head of a running session, and then the tail of one."""
    thread = threading.Thread(target=work)
    thread.start()
    for place in range(2):
        before = running.faults()
        session = running.wait_session(lambda each: each.state == "running")
        running.kill(session.route[place].peer)
        eventually(
            "a session goes on after the kill",
            lambda before=before: running.faults().resumed > before.resumed,  # type: ignore[misc]
            ANSWER_SECONDS,
        )
    assert thread.is_alive(), "the work ended before the kills"
    thread.join(ANSWER_SECONDS)
    assert not thread.is_alive()


@pytest.mark.full
def test_killed_servers_change_no_token_of_a_batch(running: Running, pipe: Pipeline) -> None:
    prompts = prompts_of(12)
    sampled = GenerationConfig(
        max_new_tokens=NEW, do_sample=True, top_k=40, random_seed=3, ignore_eos=True
    )
    configs = [sampled if place % 2 else CONFIG for place in range(12)]
    responses = []

    kill_during(running, lambda: responses.extend(pipe(prompts, configs)))

    assert len(responses) == 12
    for place, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        sampling = Sampling(temperature=0.8, top_k=40, seed=3) if place % 2 else Sampling()
        check(prompt, response.token_ids, sampling, response.finish_reason or "")


@pytest.mark.full
def test_killed_servers_change_no_token_of_streams(running: Running, pipe: Pipeline) -> None:
    prompts = prompts_of(12)
    tokens: dict[int, list[int]] = {place: [] for place in range(12)}
    ends: dict[int, str] = {}

    def read() -> None:
        for part in pipe.stream_infer(prompts, CONFIG):
            tokens[part.index] += part.token_ids
            if part.finish_reason is not None:
                ends[part.index] = part.finish_reason

    kill_during(running, read)

    for place, prompt in enumerate(prompts):
        check(prompt, tokens[place], Sampling(), ends[place])


def test_chat_goes_on_after_the_kill_of_its_server(running: Running, pipe: Pipeline) -> None:
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True)
    with pipe.session(config) as calm:
        pipe.chat("one", calm)
        pipe.chat("two", calm)

    with pipe.session(config) as killed:
        pipe.chat("one", killed)
        kept = running.wait_session(lambda each: each.state == "parked")
        for hop in kept.route:
            running.kill(hop.peer)
        pipe.chat("two", killed)
        running.wait_session(lambda each: each.state == "parked")

    assert killed.history == calm.history
    running.wait_empty()


def test_killed_gateway_changes_no_token_of_a_batch(running: Running, pipe: Pipeline) -> None:
    prompts = prompts_of(8)
    responses = []
    work = threading.Thread(target=lambda: responses.extend(pipe(prompts, CONFIG)))
    work.start()
    running.wait_session(lambda each: each.state == "running")
    before = running.local.kill(GATEWAY_JOB)
    assert running.local.wait_replaced(GATEWAY_JOB, before.incarnation, ANSWER_SECONDS)
    work.join(ANSWER_SECONDS)

    assert len(responses) == 8
    for prompt, response in zip(prompts, responses, strict=True):
        check(prompt, response.token_ids, Sampling(), response.finish_reason or "")
