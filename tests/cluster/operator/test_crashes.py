"""Kills of the operator at its writes: before the server gets the write, and after it but before the response.

The end must be that of an undisturbed run, with no pod created twice and none lost. Cases 1 to 6 of
CASES.md. The soak runs all scenarios and all writes; unit tests run them in virtual time.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
from support.kubernetes.api_client import Json
from support.kubernetes.fault_proxy import Call, Fault
from support.kubernetes.operator_process import shown
from support.kubernetes.operator_scene import Scene, swarm

MAX_RESTARTS = 80  # more than any scenario needs
SAMPLE = (2, 5)  # numbers of writes
STOP_SECONDS = 60.0  # seconds; generous, as the exit code tells a graceful stop from a forced one


@dataclass(frozen=True, slots=True)
class Scenario:
    """`prepare` makes the swarm that `act` starts from; the operator is killed during `act`."""

    name: str
    prepare: Callable[[Scene], None]
    act: Callable[[Scene], object]
    servers: int  # at the end; -1: no swarm
    made: int  # pods created during and after `act`


def _fresh(stage: Scene) -> None:
    """Prepare nothing."""


def _two_by_two(stage: Scene) -> None:
    stage.apply(swarm())
    stage.settle()


def _create(stage: Scene) -> None:
    stage.apply(swarm())


def _replicas(count: int) -> Callable[[Scene], object]:
    return lambda stage: stage.edit(replicas=count)


def _lose_a_pod(stage: Scene) -> None:
    stage.delete_pod(stage.live_pods()[0])


def _split_anew(stage: Scene) -> None:
    stage.edit(spans={"count": 4})


def _roll(stage: Scene) -> None:
    stage.edit(sessions={"maxLength": 1024})


def _remove(stage: Scene) -> None:
    stage.delete_swarm()


SCENARIOS = (
    Scenario("create", _fresh, _create, servers=4, made=4),
    Scenario("grow", _two_by_two, _replicas(3), servers=6, made=2),
    Scenario("shrink", _two_by_two, _replicas(1), servers=2, made=0),
    Scenario("refill", _two_by_two, _lose_a_pod, servers=4, made=1),
    Scenario("roll", _two_by_two, _roll, servers=4, made=4),
    Scenario("split", _two_by_two, _split_anew, servers=8, made=8),
    Scenario("remove", _two_by_two, _remove, servers=-1, made=0),
)
DAILY = (
    "create",
    "roll",
)  # the soak runs the others, and tests/unit/operator runs all in virtual time
BY_NAME = pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, marks=() if each.name in DAILY else pytest.mark.soak, id=each.name)
        for each in SCENARIOS
    ],
)


@pytest.fixture
def stage(fresh_stage: Scene) -> Scene:
    """Return an operator of the test's own, because the test kills it."""
    return fresh_stage


class Killer:
    """Kills the operator at a chosen write of one process, counted from 1.

    It decides in the proxy's thread. A kill after a write comes when the API server has responded. The test may see the
    written object before that, so the decision is final.
    """

    def __init__(self, stage: Scene) -> None:
        self._stage = stage
        self._lock = threading.Lock()
        self._seen = 0
        self._at = 0
        self._after = False
        self._decided = False
        self.killed = False
        stage.proxy.fault = self._fault

    def arm(self, at: int, *, after: bool) -> None:
        with self._lock:
            self._seen, self._at, self._after = 0, at, after

    def disarm(self) -> bool:
        """Cancel further kills. Returns False if one is decided already."""
        with self._lock:
            if not self._decided:
                self._at = 0
            return not self._decided

    def reset(self) -> None:
        """Forget the last kill. The next one needs `arm`."""
        with self._lock:
            self._at, self._decided, self.killed = 0, False, False

    def _fault(self, call: Call) -> Fault | None:
        with self._lock:
            if not call.writes or not self._at:
                return None
            self._seen += 1
            if self._seen != self._at:
                return None
            self._decided = True
        return Fault(after=self._kill) if self._after else Fault(before=self._kill)

    def _kill(self) -> None:
        self._stage.operator.process.send_signal(signal.SIGKILL)
        self.killed = True


def is_at_end(stage: Scene, scenario: Scenario) -> bool:
    if scenario.servers < 0:
        return stage.stored_swarm() is None and not stage.pods()
    return stage.is_settled(servers=scenario.servers)


def clean_end(stage: Scene, scenario: Scenario) -> Json:
    scenario.prepare(stage)
    scenario.act(stage)
    stage.wait("the end of a clean run", lambda: is_at_end(stage, scenario))
    stage.wait_quiet()
    end = stage.end_state()
    clear(stage)
    return end


def clear(stage: Scene) -> None:
    stage.delete_swarm()
    stage.wait_gone()


def run(stage: Scene, scenario: Scenario, kill: Callable[[Killer], None]) -> int:
    """Run from `act` to the end with the kills that `kill` arms, and return their number."""
    killer = Killer(stage)
    scenario.prepare(stage)
    made, kills = len(stage.created_pods()), 0
    kill(killer)
    scenario.act(stage)
    for _ in range(MAX_RESTARTS):
        stage.wait(
            "a kill or the end",
            lambda: killer.killed or (is_at_end(stage, scenario) and killer.disarm()),
        )
        if not killer.killed:
            break
        kills += 1
        stage.operator.process.wait(60)
        killer.reset()
        kill(killer)
        stage.operator.start()
    assert killer.disarm()
    stage.operator.wait_ready()  # the last process has listed all objects
    stage.wait("the end", lambda: is_at_end(stage, scenario))
    stage.wait_quiet()  # and has finished its work
    stage.check_invariants()
    assert len(stage.created_pods()) - made == scenario.made
    return kills


@pytest.mark.full
@pytest.mark.timeout(900)
@BY_NAME
def test_one_write_per_process_reaches_the_end(stage: Scene, scenario: Scenario) -> None:
    """Every process is killed after one write."""
    wanted = clean_end(stage, scenario)
    kills = run(stage, scenario, lambda killer: killer.arm(1, after=True))
    assert kills > 0
    assert shown(stage.end_state()) == shown(wanted)
    stage.check_quiet(4.5)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "scenario",
    (
        pytest.param(SCENARIOS[0], id="create"),
        pytest.param(SCENARIOS[6], marks=pytest.mark.full, id="remove"),
    ),
)
def test_kill_at_a_sampled_write_changes_nothing(
    stage: Scene, scenario: Scenario, after: bool
) -> None:
    """The fast tier has a sample; `make soak` runs all writes of all scenarios."""
    wanted = clean_end(stage, scenario)
    for number in SAMPLE:
        assert kill_once(stage, scenario, number, after, wanted) == 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@BY_NAME
def test_kill_at_each_write_changes_nothing(stage: Scene, scenario: Scenario, after: bool) -> None:
    wanted = clean_end(stage, scenario)
    for number in range(1, MAX_RESTARTS):
        if kill_once(stage, scenario, number, after, wanted) == 0:
            assert number > 2
            return
    raise AssertionError("the writes have no end")


def kill_once(stage: Scene, scenario: Scenario, number: int, after: bool, wanted: Json) -> int:
    """Kill at the given write, if there is one. Return the number of kills."""
    left = [number]

    def once(killer: Killer) -> None:
        if left:
            killer.arm(left.pop(), after=after)

    kills = run(stage, scenario, once)
    assert shown(stage.end_state()) == shown(wanted)
    stage.delete_swarm()
    stage.wait_gone()
    return kills


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 2])
def test_two_kills_at_random_writes_change_nothing(stage: Scene, seed: int) -> None:
    kill_twice(stage, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", range(10))
def test_two_kills_at_random_writes_200_times(stage: Scene, batch: int) -> None:
    for seed in range(100 + 20 * batch, 120 + 20 * batch):
        kill_twice(stage, seed)


def kill_twice(stage: Scene, seed: int) -> None:
    chance = random.Random(seed)
    scenario = chance.choice(SCENARIOS)
    left = [(chance.randint(1, 6), chance.random() < 0.5) for _ in range(2)]

    def twice(killer: Killer) -> None:
        if left:
            at, after = left.pop()
            killer.arm(at, after=after)

    run(stage, scenario, twice)
    stage.check_quiet(2.5)
    clear(stage)


@pytest.mark.full
def test_stop_in_the_middle_exits_zero_and_is_completed(stage: Scene) -> None:
    """SIGTERM while pods are created: the process exits with 0, and the next one completes the work."""
    for at in (1, 3, 5):
        seen = [0]

        def ask(call: Call, at: int = at, seen: list[int] = seen) -> Fault | None:
            seen[0] += call.writes
            if seen[0] == at and call.writes:
                stage.operator.send(signal.SIGTERM)
            return None

        stage.proxy.fault = ask
        stage.apply(swarm())
        stage.wait(f"write {at}", partial(_at_least, seen, at))
        assert stage.operator.process.wait(STOP_SECONDS) == 0
        stage.proxy.fault = lambda call: None
        stage.operator.start()
        stage.settle()
        stage.check_invariants()
        clear(stage)
        stage.operator.check_log()
    assert len(stage.created_pods()) == 12


def _at_least(seen: list[int], count: int) -> bool:
    return seen[0] >= count


@pytest.mark.full
def test_changes_while_the_operator_is_down_are_made_good(stage: Scene) -> None:
    """Case 7, shortened: without operator two pods are deleted, and the spec changes twice."""
    stage.apply(swarm())
    stage.settle()
    stage.operator.kill()
    for pod in stage.live_pods()[:2]:
        stage.delete_pod(pod)
    stage.edit(replicas=3)
    stage.edit(replicas=1)
    stage.operator.start()
    stage.settle(servers=2)
    stage.check_invariants()
    stage.check_quiet(2.5)
