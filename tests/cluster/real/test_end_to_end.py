"""The whole of it, with real pods on two real nodes: installed as the quickstart says, asked through the gateway's
Service, and robbed of pods, containers, nodes, gateways and its API server while streams go on.

Every stream is judged by the oracles of PROTOCOL section 4: no token lost or doubled, each what the whole model picks,
and the same as without the fault. Timelines are printed (`pytest -s`).
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from support.kubernetes.event_log import Life
from support.kubernetes.release import HTTP, StreamRoute, Release, open_release, pause_after
from support.kubernetes.quickstart import NAMESPACE, Quickstart, remove
from support.processes.oracles import check_contiguous, check_tokens, check_twins
from support.processes.streams import Answer, Ask, Stream
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import modelswarm.demo as demo
from tools.devcluster.real import RealCluster

pytestmark = pytest.mark.timeout(600)

FOLDER = Path(demo.__file__).parent / "counting"
NEW = 900  # tokens: seconds, so that a fault hits the middle
KILL_AT = 60
REPLACED_SECONDS = 180.0
NEXT_GATEWAY_SECONDS = 60.0  # most of it is how long the Service still names the dead one
NEXT_OPERATOR_SECONDS = 60.0


@pytest.fixture(scope="module")
def quickstart(cluster: RealCluster) -> Iterator[Quickstart]:
    """Release, with the swarm Ready: the first half of docs/kubernetes.md."""
    remove(cluster)
    started = Quickstart(cluster)
    try:
        shown = started.run("install")
        assert "condition met" in shown
        yield started
    finally:
        remove(cluster)


@pytest.fixture(scope="module")
def place(quickstart: Quickstart) -> Iterator[Release]:
    with open_release(quickstart.cluster) as there:
        yield there


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    loaded: PreTrainedModel = auto.from_pretrained(FOLDER).eval()
    return loaded


@pytest.fixture(scope="module")
def ask() -> Ask:
    ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode("count from 1 to 300:").ids
    return Ask(tuple(ids), NEW, model="counting")


@pytest.fixture(scope="module")
def calm(place: Release, ask: Ask, model: PreTrainedModel) -> Answer:
    """The same stream when nothing happens."""
    place.wait_whole()
    for _ in range(5):
        before = place.reroutes()
        answer = place.stream(ask).answer()
        check_contiguous(answer)
        check_tokens(model, answer)
        if place.reroutes() == before:
            return (
                answer  # else something did happen: half a second of silence is a reason to reroute
            )
    raise AssertionError("nothing happened, and five streams were rerouted")


def test_the_quickstart_chats_through_the_service(quickstart: Quickstart, place: Release) -> None:
    place.wait_whole()
    shown = quickstart.run("ask")
    content = json.loads(shown[shown.index("{") :])["choices"][0]["message"]["content"]
    assert "7 8 9 10 11 12" in content.replace(",", "")
    assert "counting" in place.kubectl("get", "modelswarms")


def test_the_service_answers_an_openai_stream(place: Release) -> None:
    place.wait_whole()
    body = {
        "model": "counting",
        "messages": [{"role": "user", "content": "Count from 1 to 20."}],
        "stream": True,
    }
    url = f"http://{place.address}:{HTTP}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=60) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 10


def test_helm_test_gets_a_completion(place: Release) -> None:
    place.wait_whole()
    shown = place.kubectl.helm("test", "modelswarm", "--logs")
    assert "Succeeded" in shown
    assert "counting: one two three" in shown


@pytest.mark.parametrize("hop", [0, 1], ids=["head", "tail"])
def test_a_deleted_pod_costs_the_stream_nothing(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel, hop: int
) -> None:
    stream, carried = begin(place, ask)
    victim = carried.servers[hop]
    fault = place.delete_pod(victim)
    finish(place, stream, fault, calm, model)
    successor = place.lives.successor(victim, fault, REPLACED_SECONDS)
    place.wait_whole()
    for part in (f"{victim} is Terminating", "Progressing=True", "Progressing=False", "Event "):
        place.wait(part, partial(is_told, place, fault, part), 30)
    tell(place, fault, f"kubectl delete pod of the {'head' if hop == 0 else 'tail'}")
    assert successor.name != victim
    assert successor.created - fault < 10


def test_a_killed_container_costs_the_stream_nothing(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel
) -> None:
    """The same pod comes back, by the kubelet; the operator leaves it alone."""
    processes = processes_of(place)
    stream, carried = begin(place, ask)
    victim = carried.servers[-1]
    fault = place.timeline.now(f"kill -9 of the process in {victim}")
    os.kill(processes[victim], signal.SIGKILL)
    finish(place, stream, fault, calm, model)
    place.lives.wait("its restart", partial(ready_again, victim, fault), REPLACED_SECONDS)
    place.wait_whole()
    tell(place, fault, "kill -9 of a container")
    assert victim in {pod["metadata"]["name"] for pod in place.pods()}


def test_a_dead_node_costs_the_stream_nothing(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel
) -> None:
    """No packet tells of it. The stream goes on at once; the slots are refilled elsewhere when the node is given up."""
    stream, node = begin_across(place, ask)
    try:
        lost = [pod["metadata"]["name"] for pod in place.pods() if on(pod) == node]
        fault = place.timeline.now(f"node {node} dies")
        place.cluster.kill_node(node)
        finish(place, stream, fault, calm, model)
        for name in lost:
            successor = place.lives.successor(name, fault, REPLACED_SECONDS)
            assert successor.node != node
        place.wait("the swarm to be whole on one node", lambda: _ready(place) == 4, 120)
        second = place.stream(ask).answer()
        check_twins(model, calm, second)
        tell(place, fault, "the death of a node")
    finally:
        place.cluster.revive_node(node)
    place.wait_whole()


def test_a_gateway_that_is_deleted_finishes_its_stream(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel
) -> None:
    stream, carried = begin(place, ask)
    fault = place.delete_pod(carried.gateway)
    others = [place.stream(replace(ask, new=KILL_AT)) for _ in range(3)]
    for each in (other.answer() for other in others):
        check_contiguous(each)
        check_tokens(model, each)
    place.timeline.now("three short streams that began after that have ended")
    answer = stream.answer()
    place.timeline.now("its stream has ended")
    check_contiguous(answer)
    check_twins(model, calm, answer)
    place.kubectl.wait_gone("pod", carried.gateway, 90)
    place.timeline.now(f"{carried.gateway} is gone")
    place.wait_whole()
    tell(place, fault, "kubectl delete pod of the gateway that carries the stream")


def test_a_killed_gateway_ends_its_streams_and_another_answers(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel
) -> None:
    """No stream outlives its gateway's process by itself: the client is told, and asks again."""
    processes = processes_of(place)
    stream, carried = begin(place, ask)
    fault = place.timeline.now(f"kill -9 of the process in {carried.gateway}")
    os.kill(processes[carried.gateway], signal.SIGKILL)
    heard, error = stream.heard()
    place.timeline.now(f"its stream ends: {code_of(error)}, after {len(heard.tokens)} tokens")
    assert code_of(error) == grpc.StatusCode.UNAVAILABLE
    assert heard.tokens == calm.tokens[: len(heard.tokens)]
    again = ask_until_answered(place, ask)
    place.timeline.add(again.times[0], "first token of the answer to the same question")
    check_twins(model, calm, again.answer())
    assert again.times[0] - fault < NEXT_GATEWAY_SECONDS
    place.wait_whole()
    tell(place, fault, "kill -9 of the gateway that carries the stream")


def test_a_stream_does_not_miss_the_operator(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel
) -> None:
    """It is killed, and a server with it: the stream goes on, and who leads next refills the slot."""
    processes = processes_of(place)
    stream, carried = begin(place, ask)
    leader, victim = place.operator(), carried.servers[-1]
    place.timeline.now(f"kill -9 of the operator that leads, {leader}")
    os.kill(processes[leader.rpartition("_")[0]], signal.SIGKILL)
    fault = place.delete_pod(victim)
    finish(place, stream, fault, calm, model)
    place.wait("another operator to lead", lambda: place.operator() not in ("", leader), 60)
    successor = place.lives.successor(victim, fault, REPLACED_SECONDS)
    place.wait_whole()
    tell(place, fault, "the death of the operator, and of a server that it cannot replace")
    assert successor.created - fault < NEXT_OPERATOR_SECONDS


def test_streams_go_on_and_begin_while_the_api_server_is_down(
    place: Release, ask: Ask, calm: Answer, model: PreTrainedModel
) -> None:
    processes = processes_of(place)
    stream, carried = begin(place, ask)
    api = place.cluster.api
    fault = place.timeline.now("the API server is killed")
    api.stop_apiserver()
    try:
        os.kill(
            processes[carried.servers[0]], signal.SIGKILL
        )  # and nobody but the kubelet can know
        place.timeline.now("kill -9 of the head's process")
        finish(place, stream, fault, calm, model)
        check_twins(model, calm, place.stream(ask).answer())
        place.timeline.now("a second stream, begun without an API server, has ended")
    finally:
        api.start_apiserver()
    place.timeline.now("the API server is back")
    place.wait_whole()
    tell(place, fault, "the API server's death")


def test_scale_suspend_and_resume(place: Release, ask: Ask, calm: Answer) -> None:
    place.wait_whole()
    began = place.timeline.now("kubectl scale --replicas=1")
    place.kubectl("scale", "modelswarm/counting", "--replicas=1")
    place.wait_whole(2)
    place.timeline.now("kubectl scale --replicas=0")
    place.kubectl("scale", "modelswarm/counting", "--replicas=0")
    place.wait("no server", lambda: not place.pods(), 90)
    assert place.conditions()["Ready"]["reason"] == "Suspended"
    place.timeline.now("kubectl scale --replicas=2")
    place.kubectl("scale", "modelswarm/counting", "--replicas=2")
    place.wait_whole()
    tell(place, began, "scale to one, suspend, resume")
    assert place.stream(ask).answer().tokens == calm.tokens


def test_the_rest_of_the_quickstart_and_nothing_is_left(
    quickstart: Quickstart, place: Release
) -> None:
    place.wait_whole()
    shown = quickstart.run("kill")
    assert "counting" in shown
    place.wait_whole()
    assert "Succeeded" in quickstart.run("scale")
    place.wait_whole(2)
    quickstart.run("away")
    for kind in ("modelswarms", "pods", "services", "poddisruptionbudgets", "deployments"):
        place.wait(f"no {kind}", partial(nothing_of, place, kind), 120)


def nothing_of(place: Release, kind: str) -> bool:
    """But the pod of `helm test`, which helm leaves for its logs."""
    found = {each["metadata"]["name"] for each in place.kubectl.items(kind)}
    return found <= {"modelswarm-test-completion"}


def ready_again(name: str, after: float, lives: list[Life]) -> Life | None:
    mine = (life for life in lives if life.name == name and life.restarts)
    return next((life for life in mine if life.ready > after), None)


def processes_of(place: Release) -> dict[str, int]:
    """By pod. Looked up before a stream begins: on a busy machine it could be over before that is known."""
    place.wait_whole()
    return {name: pid for name, (pid,) in place.cluster.all_pids(NAMESPACE).items()}


def begin(place: Release, ask: Ask) -> tuple[Stream, StreamRoute]:
    """A stream under way in a whole swarm."""
    place.wait_whole()
    stream = place.stream(ask)
    stream.wait_tokens(KILL_AT)
    return stream, place.carried(stream)


def begin_across(place: Release, ask: Ask) -> tuple[Stream, str]:
    """A stream with a hop on a node that its gateway is not on; that node."""
    for _ in range(20):
        stream, carried = begin(place, ask)
        home = place.node_of(carried.gateway)
        away = [node for node in map(place.node_of, carried.servers) if node != home]
        if away:
            return stream, away[0]
        stream.cancel()
    raise AssertionError("twenty streams stayed on their gateway's node")


def finish(
    place: Release, stream: Stream, fault: float, calm: Answer, model: PreTrainedModel
) -> None:
    """To its end, which must be right."""
    try:
        answer = stream.answer()
    except grpc.RpcError as error:
        story = "\n".join(place.timeline.told(fault))
        raise AssertionError(f"{error}\n{stream.count} tokens came\n{story}") from error
    pause, when = pause_after(stream, fault)
    place.timeline.add(when, f"next token, after a pause of {pause:.3f} s")
    place.timeline.add(stream.times[-1], f"the stream has ended: {len(answer.tokens)} tokens")
    check_contiguous(answer)
    check_tokens(model, answer)
    check_twins(model, calm, answer)


def code_of(error: grpc.RpcError | None) -> object:
    return error.code() if isinstance(error, grpc.Call) else error


def ask_until_answered(place: Release, ask: Ask) -> Stream:
    """As a client does that is told UNAVAILABLE: the same question again, through the Service."""
    deadline = time.monotonic() + NEXT_GATEWAY_SECONDS
    while True:
        stream = place.stream(ask)
        while not stream.done and not stream.times:
            time.sleep(0.01)
        if stream.times:
            return stream
        _, error = stream.heard()
        assert code_of(error) == grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() < deadline, error
        time.sleep(0.1)


def is_told(place: Release, since: float, part: str) -> bool:
    return any(part in line for line in place.timeline.told(since))


def tell(place: Release, fault: float, title: str) -> None:
    print(f"\n--- {title}")
    for line in place.timeline.told(fault):
        print(line)


def on(pod: dict[str, dict[str, str]]) -> str:
    return pod["spec"].get("nodeName", "")


def _ready(place: Release) -> int:
    replicas = place.swarm()["status"].get("spans", [])
    return sum(span["ready"] for span in replicas)
