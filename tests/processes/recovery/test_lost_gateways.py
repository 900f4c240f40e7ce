"""All that a request asks for survives the loss of its gateway: rules and logprobs, forks, and several answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes
from support.processes.http_requests import IDS, choices_of, expected_tokens, lines, whole
from support.processes.swarm import (
    BLOCKS,
    ENDLESS,
    VOCABULARY,
    Endpoints,
    HashSwarm,
    metrics,
    total,
    two_spans,
)

from modelswarm import Client
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.hash_model import reference_tokens

pytestmark = pytest.mark.full  # a lease of 2 s ends in each test
LEASE = ("--lease", "2")
LENGTH = 1500  # tokens of an answer
HIT_AT = 30  # tokens before the kill
RULES: dict[str, Any] = {
    "temperature": 1.0,
    "seed": 7,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"5": -1.5},
    "min_tokens": 4,
}
RULED = Sampling(**RULES | {"logit_bias": ((5, -1.5),)})
BODY: dict[str, Any] = IDS | {"max_tokens": LENGTH}


@dataclass
class Read:
    """The tokens and logprobs of a stream that the client has, perhaps in several parts."""

    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)  # log probabilities
    tops: list[dict[str, float]] = field(default_factory=list)
    last_id: str = ""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    counted = ("--metrics", "127.0.0.1:0")
    folder = tmp_path_factory.mktemp("requests")
    with two_spans(folder, *LEASE, *counted, context=ENDLESS) as running:
        yield running


def gateways(swarm: HashSwarm) -> tuple[Endpoints, Endpoints]:
    one, two = (swarm.gateway(*LEASE, name=name) for name in ("one", "two"))
    return one, two


def read(endpoints: Endpoints, body: dict[str, Any], got: Read) -> Iterator[None]:
    """Read a stream behind what there is of it; yield after each event with tokens."""
    for event_id, choice in choices_of(lines(endpoints, body, got.last_id)):
        got.tokens += choice.get("token_ids") or []
        found = choice.get("logprobs") or {"token_logprobs": [], "top_logprobs": []}
        got.values += found["token_logprobs"]
        got.tops += found["top_logprobs"]
        got.last_id = event_id
        yield


def test_stream_with_rules_and_logprobs_goes_on(swarm: HashSwarm) -> None:
    one, two = gateways(swarm)
    body = BODY | RULES | {"logprobs": 2}
    answer = httpx.post(f"{two.url}/v1/completions", json=body, timeout=60).json()
    calm = answer["choices"][0]
    assert calm["token_ids"] == expected_tokens(LENGTH, sampling=RULED)
    named, got = body | {"session_id": "ruled"}, Read()
    is_killed = False
    with pytest.raises(httpx.HTTPError):
        for _ in read(one, named, got):
            if not is_killed and len(got.tokens) > HIT_AT:
                swarm.kill("one")
                is_killed = True
    assert HIT_AT < len(got.tokens) < LENGTH
    for _ in read(two, named, got):
        pass
    assert got.tokens == calm["token_ids"]
    assert got.values == calm["logprobs"]["token_logprobs"]
    assert got.tops == calm["logprobs"]["top_logprobs"]
    swarm.kill("two")


def test_forks_of_one_session_all_go_on(swarm: HashSwarm) -> None:
    one, two = gateways(swarm)
    log = encode_bytes("go")
    log += whole(one, IDS | {"max_tokens": 20, "session_id": "trunk"})
    for number in range(4):
        made = httpx.post(
            f"{one.url}/v1/sessions/trunk/fork", json={"session_id": f"b{number}"}, timeout=60
        )
        assert made.status_code == 200, made.text
    all_run = threading.Barrier(4, lambda: swarm.kill("one"))

    def branch(number: int) -> list[int]:
        fields = {"prompt": log, "session_id": f"b{number}", "temperature": 1.0, "seed": number}
        body, got, is_killed = BODY | fields, Read(), False
        with pytest.raises(httpx.HTTPError):
            for _ in read(one, body, got):
                if not is_killed and len(got.tokens) > HIT_AT:
                    all_run.wait(30)
                    is_killed = True
        for _ in read(two, body, got):
            pass
        return got.tokens

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(branch, range(4)))
    for number, tokens in enumerate(answers):
        assert tokens == reference_tokens(
            log,
            Sampling(temperature=1.0, seed=number),
            LENGTH,
            len(log) + LENGTH,
            n_blocks=BLOCKS,
            vocabulary=VOCABULARY,
        )
    swarm.kill("two")


def test_four_answers_are_made_again_and_the_old_ones_freed(swarm: HashSwarm) -> None:
    """Several answers have no session that another gateway could take over: the client asks once more."""
    fields = BODY | RULES | {"n": 4, "logprobs": 2}
    del fields["model"]
    check_asked_again(swarm, fields, lambda one: generated(one) > 200)


def test_beams_are_made_again_and_the_old_ones_freed(swarm: HashSwarm) -> None:
    beams: dict[str, Any] = {"num_beams": 4, "n": 4, "temperature": 0, "logprobs": 1}
    fields = {"prompt": "go", "max_tokens": 300} | beams
    check_asked_again(swarm, fields, lambda _: count_sessions(swarm) >= 4)


def check_asked_again(
    swarm: HashSwarm, fields: dict[str, Any], have_begun: Callable[[Endpoints], bool]
) -> None:
    """Kill the gateway of four answers that have begun; the other one makes the same, and no session is left."""
    one, two = gateways(swarm)
    with Client(two.url) as client:
        calm = client.complete(**fields)
    with Client([one.url, two.url]) as client, ThreadPoolExecutor() as pool:
        answer = pool.submit(client.complete, **fields)
        eventually("all answers have begun", lambda: have_begun(one))
        swarm.kill("one")
        made = answer.result(120)
    assert [choice.index for choice in made.choices] == [0, 1, 2, 3]
    assert made.choices == calm.choices
    eventually("no server has a session", lambda: count_sessions(swarm) == 0)
    swarm.kill("two")


def generated(endpoints: Endpoints) -> float:
    return endpoints.metric("modelswarm_gateway_tokens_total", kind="generated")


def count_sessions(swarm: HashSwarm) -> float:
    targets = [swarm.member(name)["metrics"] for name in ("s0", "s1")]
    return sum(total(metrics(each), "modelswarm_server_sessions") for each in targets)
