"""Many swarms, many pods and many failures at once.

The large ones are soak tests on kwok, with the size MODELSWARM_SCALE (1: a thousand swarms). Their checks do not
depend on the machine's speed: the right pods, no needless write, and memory in proportion to the pods.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.kubernetes.api_client import PODS, SWARMS, Json
from support.kubernetes.fake_kubelet import failed, set_node_ready, set_status
from support.kubernetes.operator_scene import Scene, scene, swarm

from bench.cluster.control_plane import WRITES, ControlPlane, control_plane
from tools.devcluster.control_plane.api_level import ApiLevel

pytestmark = pytest.mark.full

SCALE = float(os.environ.get("MODELSWARM_SCALE", "1"))
FAULTS_SECONDS = float(os.environ.get("MODELSWARM_FAULTS_SECONDS", "7200"))
POD_SECONDS = 3.0  # seconds per pod, when all are created at once on two busy cores
LEAST_SECONDS = 300.0
LEAST_MIB, MIB_OF_POD = 200.0, 0.1
NODES = tuple(f"node-{number}" for number in range(10))


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    """Yield this test's own operator, by exec as its memory is measured, and ten nodes."""
    flags = ("--resync", "2")
    with (
        scene(api, namespace, tmp_path, *flags, nodes=NODES, fork=False) as made,
        made.operator,
    ):
        made.operator.wait_ready()
        try:
            yield made
            made.operator.check_log()
        finally:
            for node in NODES:
                made.client.delete(f"/api/v1/nodes/{node}")


def test_failure_of_a_third_of_the_nodes_moves_only_its_pods(stage: Scene) -> None:
    """Case 59: a third of the nodes fails. Pods that return with their nodes are deleted once replacements serve."""
    stage.apply(swarm(spans={"count": 4}, replicas=5))
    stage.settle(servers=20)
    stage.check_invariants()
    down, kubelet = NODES[:3], stage.kubelet
    lost = {uid_of(pod) for pod in stage.live_pods() if node_of(pod) in down}
    rest = {uid_of(pod) for pod in stage.live_pods()} - lost
    assert len(lost) == 6
    kubelet.nodes = NODES[3:]  # the scheduler's choice for new pods
    kubelet.ends_pod = lambda pod: node_of(pod) not in down
    for node in down:
        set_node_ready(stage.client, node, False)
    stage.wait("successors elsewhere", lambda: len(serving(stage, down)) == 20)
    assert rest <= {uid_of(pod) for pod in serving(stage, down)}
    kubelet.ends_pod = lambda pod: True
    for node in down:
        set_node_ready(stage.client, node, True)
    stage.settle(servers=20)
    stage.check_invariants()
    assert rest <= {uid_of(pod) for pod in stage.live_pods()}
    assert len(stage.created_pods()) == 26


def serving(stage: Scene, down: tuple[str, ...]) -> list[Json]:
    return [
        pod
        for pod in stage.live_pods()
        if node_of(pod) not in down and pod["status"].get("phase") == "Running"
    ]


def node_of(pod: Json) -> str:
    return str(pod["spec"].get("nodeName", ""))


def uid_of(pod: Json) -> str:
    return str(pod["metadata"]["uid"])


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_thousand_swarms_are_changed_at_once_and_restarted() -> None:
    """Cases 56, 58 and 60."""
    count = round(1000 * SCALE)
    with control_plane(audit=True) as plane:
        for number in range(count):
            plane.client.post(
                SWARMS.format(plane.namespace), small(f"swarm-{number}", spans=3, replicas=1)
            )
        wait_whole(plane, count, 3 * count, "from nothing")
        restarted(plane, count, 3 * count)
        for number in range(count):
            path = f"{SWARMS.format(plane.namespace)}/swarm-{number}"
            plane.client.patch(path, {"spec": {"rollout": {"surge": 2}}})
        wait_whole(plane, count, 3 * count, "all changed at once")


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_swarm_of_a_thousand_pods_outlives_a_restart() -> None:
    """Case 57; case 58 for one large swarm."""
    replicas = round(250 * SCALE)
    with control_plane(audit=True) as plane:
        plane.client.post(
            SWARMS.format(plane.namespace), small("large", spans=4, replicas=replicas)
        )
        wait_whole(plane, 1, 4 * replicas, "from nothing")
        restarted(plane, 1, 4 * replicas)


def small(name: str, *, spans: int, replicas: int) -> Json:
    """Return a swarm whose pods request nothing, as kwok's nodes hold only hundreds of requesting pods."""
    return swarm(name, spans={"count": spans}, replicas=replicas)


def wait_whole(plane: ControlPlane, swarms: int, pods: int, what: str) -> None:
    began, before = time.perf_counter(), plane.cpu_seconds()
    plane.wait_ready(swarms, max(LEAST_SECONDS, POD_SECONDS * pods))
    seconds, memory = time.perf_counter() - began, plane.memory_mib()
    cpu = plane.cpu_seconds() - before
    print(f"{what}: {pods} pods, {seconds:.1f} s, {cpu:.1f} CPU s, {memory:.0f} MiB")
    made = Counter(
        (pod["metadata"]["labels"]["modelswarm.io/swarm-uid"],
         pod["metadata"]["labels"]["modelswarm.io/slot"])
        for pod in plane.client.items(PODS.format(plane.namespace))
    )  # fmt: skip
    assert len(made) == pods
    assert set(made.values()) == {1}
    assert memory < LEAST_MIB + MIB_OF_POD * pods


def restarted(plane: ControlPlane, swarms: int, pods: int) -> None:
    """Restart the operator, and check that the next process writes nothing but its Lease."""
    skip, _ = plane.read_requests()
    plane.operator.kill()
    plane.operator.start()
    plane.operator.wait_ready(LEAST_SECONDS)
    wait_whole(plane, swarms, pods, "after a restart")
    time.sleep(10.0)  # every swarm has been reconciled
    _, seen = plane.read_requests(skip)
    asked = ("leases", "selfsubjectaccessreviews")
    writes = [each for each in seen if each[0] in WRITES and each[1] not in asked]
    print(f"after a restart: {len(seen)} requests")
    assert writes == []


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_hours_of_random_faults_do_not_grow_memory(stage: Scene) -> None:
    """Case 61: pods end or are deleted, nodes fail and return, the spec changes; the end is that of a clean run."""
    chance, client = random.Random(61), stage.client
    stage.apply(swarm())
    stage.settle()
    clean, first = stage.end_state(), 0.0
    began = time.monotonic()
    while (elapsed := time.monotonic() - began) < FAULTS_SECONDS:
        chance.choice(FAULTS)(stage, chance)
        time.sleep(chance.uniform(0.0, 1.0))
        if not first and elapsed > FAULTS_SECONDS / 4:
            first = memory_of(stage)
    for node in NODES:
        set_node_ready(client, node, True)
    stage.edit(replicas=2)
    stage.annotate("counting", reconcile_at="the end")
    stage.settle(seconds=LEAST_SECONDS)
    last = memory_of(stage)
    print(
        f"{len(stage.created_pods())} pods made; {first:.0f} MiB after a quarter, {last:.0f} at the end"
    )
    stage.wait_quiet()
    stage.check_invariants()
    end = stage.end_state()
    end["status"].pop("reconciledAt")
    for state in (clean, end):
        state["status"].pop("observedGeneration")
        for each in state["status"]["conditions"]:
            each.pop("observedGeneration", None)
    assert end == clean
    assert last < 1.15 * first + 5


def end_a_pod(stage: Scene, chance: random.Random) -> None:
    if pods := stage.live_pods():
        set_status(stage.client, chance.choice(pods), **failed("Evicted"))


def delete_a_pod(stage: Scene, chance: random.Random) -> None:
    if pods := stage.live_pods():
        stage.delete_pod(chance.choice(pods))


def flip_a_node(stage: Scene, chance: random.Random) -> None:
    set_node_ready(stage.client, chance.choice(NODES[:2]), chance.random() < 0.5)


def scale(stage: Scene, chance: random.Random) -> None:
    stage.edit(replicas=chance.randint(1, 3))


def ask_again(stage: Scene, chance: random.Random) -> None:
    stage.annotate("counting", reconcile_at=str(chance.random()))


FAULTS: tuple[Callable[[Scene, random.Random], None], ...] = (
    end_a_pod,
    delete_a_pod,
    flip_a_node,
    scale,
    ask_again,
)


def memory_of(stage: Scene) -> float:
    text = Path(f"/proc/{stage.operator.process.pid}/status").read_text()
    (line,) = (each for each in text.splitlines() if each.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024
