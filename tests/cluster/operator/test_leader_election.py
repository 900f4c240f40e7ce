"""Two operators and one Lease: who leads, how fast the other takes over, and that a leader that lost it writes no more.

Cases 54 and 55 of operator.md section 3. Times are measured from outside and printed; the bars are the issue's.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.kubernetes.fault_proxy import Call, Fault
from support.kubernetes.operator_process import Operator
from support.kubernetes.operator_scene import Scene, scene, swarm

from tools.devcluster.control_plane.api_level import ApiLevel

KILLED_BAR = 15.0  # seconds until the other leads
STOPPED_BAR = 2.0
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/modelswarm-operator"


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    with scene(api, namespace, tmp_path) as made:
        yield made


@pytest.fixture
def pair(stage: Scene) -> Iterator[tuple[Operator, Operator]]:
    """The first leads through the proxy, the second stands by and reaches the API server directly."""
    with ExitStack() as stack:
        first = stack.enter_context(stage.another("--resync", "2", elect=True))
        stage.wait("the first to lead", first.leads)
        second = stack.enter_context(stage.another("--resync", "2", elect=True, direct=True))
        second.wait_ready()
        yield first, second
        for each in (first, second):
            each.check_log()


def takeover(stage: Scene, second: Operator) -> float:
    began = time.monotonic()
    stage.wait("the second to lead", second.leads)
    return time.monotonic() - began


def test_the_standby_is_ready_and_does_nothing(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    assert second.probe("ready")[0] == second.probe("live")[0] == 200
    assert not second.leads()
    assert stage.plain.get(LEASES.format(stage.namespace))["spec"]["leaseDurationSeconds"] <= 8
    stage.apply(swarm())
    stage.settle()
    assert second.metric("modelswarm_operator_pods_created_total") == 0
    assert first.metric("modelswarm_operator_pods_created_total") == 4


def test_after_a_kill_the_standby_takes_over(stage: Scene, pair: tuple[Operator, Operator]) -> None:
    first, second = pair
    stage.apply(swarm())
    stage.settle()
    first.kill()
    lost = stage.live()[0]
    stage.delete_pod(lost)
    seconds = takeover(stage, second)
    stage.settle()
    print(f"takeover after SIGKILL: {seconds:.1f} s")
    assert seconds < KILLED_BAR
    assert second.metric("modelswarm_operator_pods_created_total") == 1


def test_after_a_graceful_stop_the_standby_takes_over_at_once(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    began = time.monotonic()
    code, stopping = first.stop()
    stage.wait("the second to lead", second.leads)
    seconds = time.monotonic() - began - stopping
    print(f"stopped in {stopping:.2f} s, takeover {seconds:.2f} s after that")
    assert code == 0
    assert seconds < STOPPED_BAR


def test_a_stop_in_the_middle_of_a_renewal_frees_the_lease_as_well(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    """The API server has done it, and the operator will never know."""
    first, second = pair
    asked: list[Call] = []

    def stop(call: Call) -> Fault | None:
        if asked or call.verb != "PUT" or not call.path.endswith("/leases/modelswarm-operator"):
            return None
        asked.append(call)
        return Fault(after=lambda: first.send(signal.SIGTERM))

    stage.proxy.fault = stop
    stage.wait("a renewal", lambda: asked)
    assert first.process.wait(5) == 0
    seconds = takeover(stage, second)
    print(f"takeover {seconds:.2f} s after the stop in a renewal")
    assert seconds < STOPPED_BAR


def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    """SIGSTOP for twice the lease: the other leads, and the first ends itself before any write."""
    first, second = pair
    stage.apply(swarm())
    stage.settle()
    first.send(signal.SIGSTOP)
    takeover(stage, second)
    stage.edit(replicas=1)
    stage.settle(servers=2)
    before = len(stage.writes())  # only the first goes through the proxy
    time.sleep(2)
    first.send(signal.SIGCONT)
    assert first.process.wait(10) == 1
    assert len(stage.writes()) == before
    stage.settle(servers=2)


def test_a_leader_cut_off_from_the_api_server_ends_before_the_standby_leads(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    stage.proxy.fault = lambda call: Fault(hang=30)
    stage.wait("the first to end", lambda: not first.running)
    assert not second.leads()
    assert takeover(stage, second) < KILLED_BAR
    assert first.process.returncode == 1


def test_a_renewal_that_fails_now_and_then_costs_nothing(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    count = [0]

    def every_other(call: Call) -> Fault | None:
        if not call.path.endswith("/leases/modelswarm-operator"):
            return None
        count[0] += 1
        return Fault(answer=503) if count[0] % 2 else None

    stage.proxy.fault = every_other
    time.sleep(10)
    assert first.running
    assert first.leads()
    assert not second.leads()


def test_a_lease_that_was_edited_or_deleted_by_hand_is_kept(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    path = LEASES.format(stage.namespace)
    holder = stage.plain.get(path)["spec"]["holderIdentity"]
    stage.plain.patch(path, {"metadata": {"labels": {"touched": "yes"}}})
    time.sleep(3)
    assert stage.plain.get(path)["spec"]["holderIdentity"] == holder
    stage.plain.delete(path)
    time.sleep(4)

    def leading() -> int:
        return sum(each.running and each.leads() for each in (first, second))

    stage.wait("one leader", lambda: leading() == 1, 15)  # whoever was faster; not both, not none
    assert stage.plain.get(path)["spec"]["holderIdentity"]


def test_a_lease_taken_by_hand_ends_the_leader(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    stage.plain.patch(LEASES.format(stage.namespace), {"spec": {"holderIdentity": "somebody"}})
    assert first.process.wait(10) == 1
    takeover(stage, second)


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_clock_that_is_an_hour_off_does_not_matter(stage: Scene, hours: int) -> None:
    """What is written in the Lease is never compared with a clock; neither are backoffs and ages."""
    with stage.another("--resync", "2", elect=True) as first:
        stage.wait("the first to lead", first.leads)
        path = LEASES.format(stage.namespace)

        def skewed() -> bool:
            shift = time.gmtime(time.time() + 3600 * hours)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", shift)
            stage.plain.patch(path, {"spec": {"renewTime": stamp, "acquireTime": stamp}})
            return first.running and first.leads()

        with stage.another("--resync", "2", elect=True, direct=True) as second:
            second.wait_ready()
            ends = time.monotonic() + 10
            while time.monotonic() < ends:
                assert skewed()
                time.sleep(0.5)
            assert not second.leads()
            first.kill()
            assert takeover(stage, second) < KILLED_BAR


def test_two_operators_without_an_election_agree(stage: Scene) -> None:
    """Nobody should run them so; names and versions keep them from harm, and the end is quiet."""
    with stage.another("--resync", "2") as first, stage.another("--resync", "2") as second:
        for each in (first, second):
            each.wait_ready()
        stage.apply(swarm())
        stage.settle()
        stage.delete_pod(stage.live()[0])
        stage.wait("a replacement", lambda: len(stage.made()) >= 5)
        stage.settle()
        stage.edit(replicas=3)
        stage.settle(servers=6)
        stage.check_quiet(5.0)
        stage.check()
        for each in (first, second):
            each.check_log()
        assert len(stage.made()) <= 8  # 4 + 1 + 2, and one at most that lost a race
