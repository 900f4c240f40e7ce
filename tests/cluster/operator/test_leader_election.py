"""Two operators and one Lease: leadership, takeover, and no writes of a leader without the Lease.

A Lease of an hour proves takeovers that do not wait for its end. Times are printed, not checked.
"""

from __future__ import annotations

import json
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

HOUR = 3600
TIMESTAMP = len("2026-11-23 11:46:29,944")  # start of each log line
EXIT_SECONDS = 60.0  # seconds; generous, as the exit code is the proof
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/modelswarm-operator"


@pytest.fixture
def stage(api: ApiLevel, namespace: str, tmp_path: Path) -> Iterator[Scene]:
    with scene(api, namespace, tmp_path) as made:
        yield made


@pytest.fixture
def pair(stage: Scene) -> Iterator[tuple[Operator, Operator]]:
    """Yield two operators: the leader behind the proxy, and a standby at the API server itself."""
    with ExitStack() as stack:
        first = stack.enter_context(stage.another_operator("--resync", "2", elect=True))
        stage.wait("the first to lead", first.leads)
        second = stack.enter_context(
            stage.another_operator("--resync", "2", elect=True, direct=True)
        )
        second.wait_ready()
        yield first, second
        for each in (first, second):
            each.check_log()


@pytest.fixture
def patient_pair(stage: Scene, pair: tuple[Operator, Operator]) -> tuple[Operator, Operator]:
    """Return the same pair with a stored Lease of one hour: the second leads only if the first releases it."""
    stage.proxy.rewrite = with_an_hour
    stored = LEASES.format(stage.namespace)
    stage.wait(
        "a Lease of an hour",
        lambda: stage.client.get(stored)["spec"]["leaseDurationSeconds"] == HOUR,
    )
    return pair


def with_an_hour(call: Call, body: bytes) -> bytes:
    """Return the body with a Lease of one hour. The leader keeps its own setting."""
    if call.verb != "PUT" or not call.path.endswith("/leases/modelswarm-operator"):
        return body
    lease = json.loads(body)
    lease["spec"]["leaseDurationSeconds"] = HOUR
    return json.dumps(lease).encode()


def takeover(stage: Scene, second: Operator) -> float:
    """Wait until the second leads; return the seconds until then."""
    began = time.monotonic()
    stage.wait("the second to lead", second.leads)
    return time.monotonic() - began


@pytest.mark.full
def test_standby_is_ready_and_writes_nothing(stage: Scene, pair: tuple[Operator, Operator]) -> None:
    first, second = pair
    assert second.probe("ready")[0] == second.probe("live")[0] == 200
    assert not second.leads()
    assert stage.client.get(LEASES.format(stage.namespace))["spec"]["leaseDurationSeconds"] <= 8
    stage.apply(swarm())
    stage.settle()
    assert created(second) == 0
    stage.wait("the first to count four pods", lambda: created(first) == 4)


def test_standby_leads_after_the_leader_is_killed(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    stage.apply(swarm())
    stage.settle()
    first.kill()
    lost = stage.live_pods()[0]
    stage.delete_pod(lost)
    seconds = takeover(stage, second)
    stage.settle()
    print(f"takeover after SIGKILL: {seconds:.1f} s")
    stage.wait("the second to count one pod", lambda: created(second) == 1)


def created(operator: Operator) -> float:
    return operator.metric("modelswarm_operator_pods_created_total")


@pytest.mark.full
def test_graceful_stop_frees_the_lease(
    stage: Scene, patient_pair: tuple[Operator, Operator]
) -> None:
    first, second = patient_pair
    assert first.stop() == 0
    print(f"takeover {takeover(stage, second):.2f} s after a graceful stop")


@pytest.mark.full
def test_stop_during_a_renewal_frees_the_lease(
    stage: Scene, patient_pair: tuple[Operator, Operator]
) -> None:
    """The API server renews the Lease, but the operator gets no response."""
    first, second = patient_pair
    asked: list[Call] = []

    def stop(call: Call) -> Fault | None:
        if asked or call.verb != "PUT" or not call.path.endswith("/leases/modelswarm-operator"):
            return None
        asked.append(call)
        return Fault(after=lambda: first.send(signal.SIGTERM))

    stage.proxy.fault = stop
    stage.wait("a renewal", lambda: asked)
    assert first.process.wait(EXIT_SECONDS) == 0
    print(f"takeover {takeover(stage, second):.2f} s after the stop in a renewal")


@pytest.mark.full
def test_resumed_leader_without_a_lease_writes_nothing(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    """The leader is stopped until the other leads; when continued, it exits before any write."""
    first, second = pair
    stage.apply(swarm())
    stage.settle()
    first.send(signal.SIGSTOP)
    takeover(stage, second)
    stage.edit(replicas=1)
    stage.settle(servers=2)
    before = len(stage.writes())  # only the first uses the proxy
    time.sleep(2)
    first.send(signal.SIGCONT)
    assert first.process.wait(EXIT_SECONDS) == 1
    assert len(stage.writes()) == before
    stage.settle(servers=2)


@pytest.mark.full
def test_leader_cut_off_ends_before_the_standby_leads(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    stage.proxy.fault = lambda call: Fault(hang=30)
    stage.wait("the first to end", lambda: not first.running)
    assert first.process.returncode == 1
    print(f"takeover {takeover(stage, second):.1f} s after the first has ended")
    (led,) = (line for line in second.text().splitlines() if "leading as" in line)
    ended = first.text().splitlines()[-1]
    assert ended[:TIMESTAMP] < led[:TIMESTAMP]


@pytest.mark.full
def test_renewals_that_fail_sometimes_keep_the_leader(
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


@pytest.mark.full
def test_lease_edited_or_deleted_by_hand_has_one_holder(
    stage: Scene, pair: tuple[Operator, Operator]
) -> None:
    first, second = pair
    path = LEASES.format(stage.namespace)
    holder = stage.client.get(path)["spec"]["holderIdentity"]
    stage.client.patch(path, {"metadata": {"labels": {"touched": "yes"}}})
    time.sleep(3)
    assert stage.client.get(path)["spec"]["holderIdentity"] == holder
    stage.client.delete(path)
    time.sleep(4)

    def leading() -> int:
        return sum(each.running and each.leads() for each in (first, second))

    stage.wait("one leader", lambda: leading() == 1)  # the faster one
    assert stage.client.get(path)["spec"]["holderIdentity"]


@pytest.mark.full
def test_lease_taken_by_hand_ends_the_leader(stage: Scene, pair: tuple[Operator, Operator]) -> None:
    first, second = pair
    stage.client.patch(LEASES.format(stage.namespace), {"spec": {"holderIdentity": "another"}})
    assert first.process.wait(EXIT_SECONDS) == 1
    takeover(stage, second)


@pytest.mark.full
def test_lease_times_an_hour_off_change_nothing(stage: Scene) -> None:
    """The operator compares no time of the Lease with a clock."""
    with stage.another_operator("--resync", "2", elect=True) as first:
        stage.wait("the first to lead", first.leads)
        path = LEASES.format(stage.namespace)

        def skewed(hours: int) -> bool:
            shift = time.gmtime(time.time() + HOUR * hours)
            stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000Z", shift)
            stage.client.patch(path, {"spec": {"renewTime": stamp, "acquireTime": stamp}})
            return first.running and first.leads()

        with stage.another_operator("--resync", "2", elect=True, direct=True) as second:
            second.wait_ready()
            for number in range(20):  # longer than the term of a Lease
                assert skewed(-1 if number % 2 else 1)
                time.sleep(0.5)
            assert not second.leads()
            first.kill()
            takeover(stage, second)


@pytest.mark.full
def test_two_operators_without_election_agree(stage: Scene) -> None:
    """A wrong installation: names and versions prevent harm, and the writes end."""
    with (
        stage.another_operator("--resync", "2") as first,
        stage.another_operator("--resync", "2") as second,
    ):
        for each in (first, second):
            each.wait_ready()
        stage.apply(swarm())
        stage.settle()
        stage.delete_pod(stage.live_pods()[0])
        stage.wait("a replacement", lambda: len(stage.created_pods()) >= 5)
        stage.settle()
        stage.edit(replicas=3)
        stage.settle(servers=6)
        stage.check_quiet(5.0)
        stage.check_invariants()
        for each in (first, second):
            each.check_log()
        assert len(stage.created_pods()) <= 8  # 4 + 1 + 2, and at most one more after a lost race
