"""Streams through real pods on two real nodes, while pods, containers, nodes, gateways and the API server fail.

The release is the quickstart's; requests use the gateway's Service. The oracles of docs/protocol.md ("The same
output") check every stream. No token is lost or repeated, and each is the pick of the whole model, as without the
fault. Answers are too long to end before the fault; they are cancelled some tokens later. `pytest -s` prints
timelines.
"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.eventually import eventually
from support.kubernetes.event_log import PodTimes
from support.kubernetes.quickstart import NAMESPACE
from support.kubernetes.release import Release, StreamRoute, pause_after
from support.processes.oracles import check_contiguous, check_tokens, check_twins
from support.processes.streams import ANSWER_SECONDS, Answer, Request, Stream
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import modelswarm.demo as demo

pytestmark = pytest.mark.timeout(600)

FOLDER = Path(demo.__file__).parent / "counting"
NEW = 3000  # tokens of minutes, so that no answer ends before its fault
SHORT = 400  # tokens of an answer that is read completely
KILL_AT = 60  # tokens before the fault
READ_ON = 150  # tokens after the fault, before the answer is cancelled
REPLACED_SECONDS = 180.0
NEXT_GATEWAY_SECONDS = 180.0  # seconds; for most of them, the Service still has the killed gateway


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    auto: Any = AutoModelForCausalLM
    loaded: PreTrainedModel = auto.from_pretrained(FOLDER).eval()
    return loaded


@pytest.fixture(scope="module")
def long_request() -> Request:
    ids = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode("count from 1 to 300:").ids
    return Request(tuple(ids), NEW, model="counting")


@pytest.fixture(scope="module")
def undisturbed(release: Release, long_request: Request, model: PreTrainedModel) -> Answer:
    """Return the beginning of the same answer without a fault."""
    release.wait_whole()
    answer = release.stream(long_request).read_and_cancel(KILL_AT + READ_ON)
    check_contiguous(answer)
    check_tokens(model, answer)
    return answer


@pytest.mark.parametrize(
    "hop",
    [pytest.param(0, marks=pytest.mark.full, id="head"), pytest.param(1, id="tail")],
)
def test_stream_goes_on_after_a_pod_is_deleted(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel, hop: int
) -> None:
    stream, carried = begin(release, long_request)
    victim = carried.servers[hop]
    fault = release.delete_pod(victim)
    finish(release, stream, fault, undisturbed, model)
    successor = release.pod_log.wait_successor(victim, fault, REPLACED_SECONDS)
    release.wait_whole()
    for part in (f"{victim} is Terminating", "Progressing=True", "Progressing=False", "Event "):
        release.wait(part, partial(is_reported, release, fault, part), 180)
    tell(release, fault, f"kubectl delete pod of the {'head' if hop == 0 else 'tail'}")
    assert successor.name != victim


def test_stream_goes_on_after_a_container_is_killed(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel
) -> None:
    """The kubelet restarts the container in the same pod; the operator changes nothing."""
    processes = processes_of(release)
    stream, carried = begin(release, long_request)
    victim = carried.servers[-1]
    fault = release.timeline.now(f"kill -9 of the process in {victim}")
    os.kill(processes[victim], signal.SIGKILL)
    finish(release, stream, fault, undisturbed, model)
    release.pod_log.wait("its restart", partial(ready_again, victim, fault), REPLACED_SECONDS)
    release.wait_whole()
    tell(release, fault, "kill -9 of a container")
    assert victim in {pod["metadata"]["name"] for pod in release.pods()}


@pytest.mark.full
def test_stream_goes_on_after_a_node_dies(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel
) -> None:
    """A dead node sends nothing. The stream continues at once; the slots are refilled once the node is NotReady."""
    stream, node = begin_across(release, long_request)
    try:
        lost = [pod["metadata"]["name"] for pod in release.pods() if node_of(pod) == node]
        fault = release.timeline.now(f"node {node} dies")
        release.cluster.kill_node(node)
        finish(release, stream, fault, undisturbed, model)
        for name in lost:
            successor = release.pod_log.wait_successor(name, fault, REPLACED_SECONDS)
            assert successor.node != node
        release.wait("the swarm to be whole on one node", lambda: _ready(release) == 4, 120)
        check_twins(model, undisturbed, release.stream(long_request).read_and_cancel(READ_ON))
        tell(release, fault, "the death of a node")
    finally:
        release.cluster.revive_node(node)
    release.wait_whole()


@pytest.mark.full
def test_deleted_gateway_finishes_its_stream(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel
) -> None:
    stream, carried = begin(release, replace(long_request, new=SHORT))
    fault = release.delete_pod(carried.gateway)
    others = [release.stream(replace(long_request, new=KILL_AT)) for _ in range(3)]
    for each in (other.answer() for other in others):
        check_contiguous(each)
        check_tokens(model, each)
    release.timeline.now("three short streams that began after that have ended")
    answer = stream.answer()
    release.timeline.now("its stream has ended")
    check_contiguous(answer)
    check_tokens(model, answer)
    check_twins(model, undisturbed, replace(answer, finish=""))  # for their common length
    release.kubectl.wait_gone("pod", carried.gateway, 90)
    release.timeline.now(f"{carried.gateway} is gone")
    release.wait_whole()
    tell(release, fault, "kubectl delete pod of the gateway that carries the stream")


@pytest.mark.full
def test_killed_gateway_ends_its_streams_and_another_answers(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel
) -> None:
    """The client of a killed gateway gets an error, and repeats its request."""
    processes = processes_of(release)
    stream, carried = begin(release, long_request)
    fault = release.timeline.now(f"kill -9 of the process in {carried.gateway}")
    os.kill(processes[carried.gateway], signal.SIGKILL)
    answer, error = stream.received()
    release.timeline.now(f"its stream ends: {code_of(error)}, after {len(answer.tokens)} tokens")
    assert code_of(error) == grpc.StatusCode.UNAVAILABLE
    check_contiguous(answer)
    check_twins(model, undisturbed, answer)
    again = ask_until_answered(release, long_request)
    release.timeline.add(again.times[0], "first token of the answer to the same question")
    check_twins(model, undisturbed, again.read_and_cancel(READ_ON))
    release.wait_whole()
    tell(release, fault, "kill -9 of the gateway that carries the stream")


@pytest.mark.full
def test_stream_goes_on_without_the_operator(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel
) -> None:
    """The leader is killed and a server deleted: the stream continues, and the next leader refills the slot."""
    processes = processes_of(release)
    stream, carried = begin(release, long_request)
    leader, victim = release.leader(), carried.servers[-1]
    release.timeline.now(f"kill -9 of the operator that leads, {leader}")
    os.kill(processes[leader.rpartition("_")[0]], signal.SIGKILL)
    fault = release.delete_pod(victim)
    finish(release, stream, fault, undisturbed, model)
    release.wait("another operator to lead", lambda: release.leader() not in ("", leader), 60)
    release.pod_log.wait_successor(victim, fault, REPLACED_SECONDS)
    release.wait_whole()
    tell(release, fault, "kill -9 of the operator that leads, and a deleted server")


@pytest.mark.full
def test_streams_run_while_the_api_server_is_down(
    release: Release, long_request: Request, undisturbed: Answer, model: PreTrainedModel
) -> None:
    processes = processes_of(release)
    stream, carried = begin(release, long_request)
    api = release.cluster.api
    fault = release.timeline.now("the API server is killed")
    api.stop_apiserver()
    try:
        os.kill(processes[carried.servers[0]], signal.SIGKILL)  # detected only by the kubelet
        release.timeline.now("kill -9 of the head's process")
        finish(release, stream, fault, undisturbed, model)
        check_twins(model, undisturbed, release.stream(long_request).read_and_cancel(READ_ON))
        release.timeline.now("a second stream, begun without an API server, was read")
    finally:
        api.start_apiserver()
    release.timeline.now("the API server is back")
    release.wait_whole()
    tell(release, fault, "the API server's death")


@pytest.mark.full
def test_swarm_scales_suspends_and_resumes(
    release: Release, long_request: Request, undisturbed: Answer
) -> None:
    release.wait_whole()
    began = release.timeline.now("kubectl scale --replicas=1")
    release.kubectl("scale", "modelswarm/counting", "--replicas=1")
    release.wait_whole(2)
    release.timeline.now("kubectl scale --replicas=0")
    release.kubectl("scale", "modelswarm/counting", "--replicas=0")
    release.wait("no server", lambda: not release.pods(), 90)
    assert release.conditions()["Ready"]["reason"] == "Suspended"
    release.timeline.now("kubectl scale --replicas=2")
    release.kubectl("scale", "modelswarm/counting", "--replicas=2")
    release.wait_whole()
    tell(release, began, "scale to one, suspend, resume")
    again = release.stream(long_request).read_and_cancel(len(undisturbed.tokens))
    assert again.tokens[: len(undisturbed.tokens)] == undisturbed.tokens


def ready_again(name: str, after: float, lives: list[PodTimes]) -> PodTimes | None:
    mine = (life for life in lives if life.name == name and life.restarts)
    return next((life for life in mine if life.ready > after), None)


def processes_of(release: Release) -> dict[str, int]:
    """Return the first process of each pod of a whole swarm."""
    release.wait_whole()
    return {name: pid for name, (pid,) in release.cluster.main_pids(NAMESPACE).items()}


def begin(release: Release, long_request: Request) -> tuple[Stream, StreamRoute]:
    """Start a stream in a whole swarm, and return it with its route."""
    release.wait_whole()
    stream = release.stream(long_request)
    stream.wait_tokens(KILL_AT)
    return stream, release.find_route(stream)


def begin_across(release: Release, long_request: Request) -> tuple[Stream, str]:
    """Start a stream that has a hop on another node than its gateway; return it with that node."""
    for _ in range(20):
        stream, carried = begin(release, long_request)
        home = release.node_of(carried.gateway)
        away = [node for node in map(release.node_of, carried.servers) if node != home]
        if away:
            return stream, away[0]
        stream.cancel()
    raise AssertionError("twenty streams stayed on their gateway's node")


def finish(
    release: Release, stream: Stream, fault: float, undisturbed: Answer, model: PreTrainedModel
) -> None:
    """Read `READ_ON` tokens after the fault, cancel, and check the answer."""
    try:
        answer = stream.read_and_cancel(stream.count + READ_ON)
    except grpc.RpcError as error:
        story = "\n".join(release.timeline.lines_since(fault))
        raise AssertionError(f"{error}\n{stream.count} tokens came\n{story}") from error
    pause, when = pause_after(stream, fault)
    release.timeline.add(when, f"next token, after a pause of {pause:.3f} s")
    release.timeline.add(stream.times[-1], f"the stream is cancelled: {len(answer.tokens)} tokens")
    check_contiguous(answer)
    check_tokens(model, answer)
    check_twins(model, undisturbed, answer)


def code_of(error: grpc.RpcError | None) -> object:
    return error.code() if isinstance(error, grpc.Call) else error


def ask_until_answered(release: Release, long_request: Request) -> Stream:
    """Repeat the request through the Service, as after UNAVAILABLE, until tokens arrive."""
    errors: list[grpc.RpcError | None] = []

    def answered() -> Stream | None:
        stream = release.stream(long_request)
        eventually("an answer or its end", lambda: stream.done or stream.count, ANSWER_SECONDS)
        if stream.count:
            return stream
        _, error = stream.received()
        assert code_of(error) == grpc.StatusCode.UNAVAILABLE
        errors.append(error)
        return None

    return eventually("an answer", answered, NEXT_GATEWAY_SECONDS, lambda: errors[-1:])


def is_reported(release: Release, since: float, part: str) -> bool:
    return any(part in line for line in release.timeline.lines_since(since))


def tell(release: Release, fault: float, title: str) -> None:
    print(f"\n--- {title}")
    for line in release.timeline.lines_since(fault):
        print(line)


def node_of(pod: dict[str, dict[str, str]]) -> str:
    return pod["spec"].get("nodeName", "")


def _ready(release: Release) -> int:
    replicas = release.swarm()["status"].get("spans", [])
    return sum(span["ready"] for span in replicas)
