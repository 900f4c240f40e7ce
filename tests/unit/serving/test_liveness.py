"""The liveness and readiness of a server process."""

from __future__ import annotations

from http.client import HTTPConnection

import pytest
from support.eventually import SECONDS
from support.ports import loopback_hosts

from modelswarm.process.start_progress import StartPhase, StartProgress
from modelswarm_serving.runtime.liveness import LOOP_SECONDS, STEP_SECONDS, Liveness
from modelswarm_serving.runtime.probe_server import ProbeServer


class LivenessHarness:
    """The liveness of a server, with a clock that tests move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.liveness = Liveness(lambda: self.now)

    def pass_time(self, seconds: float, *, loop_runs: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if loop_runs:
                self.liveness.on_loop()

    def read_state(self) -> tuple[bool, bool]:
        """Return (is live, is ready)."""
        return self.liveness.stall_reason is None, self.liveness.unready_reason is None


def test_loading_server_is_live_but_not_ready() -> None:
    harness = LivenessHarness()
    assert harness.read_state() == (True, False)
    harness.pass_time(24 * 3600, loop_runs=False)
    assert harness.read_state() == (True, False)
    assert harness.liveness.unready_reason == "the model is being loaded"
    assert harness.liveness.start_progress == StartProgress(StartPhase.IMPORTING)


def test_loaded_server_is_ready_until_it_stops() -> None:
    harness = LivenessHarness()
    harness.liveness.mark_ready()
    assert harness.liveness.start_progress is None
    harness.pass_time(1000)
    assert harness.read_state() == (True, True)
    harness.liveness.mark_stopping()
    assert harness.read_state() == (True, False)


def test_stalled_event_loop_fails_liveness_until_it_resumes() -> None:
    harness = LivenessHarness()
    harness.liveness.mark_ready()
    harness.pass_time(1)
    harness.pass_time(LOOP_SECONDS - 1, loop_runs=False)
    assert harness.read_state() == (True, True)
    harness.pass_time(3, loop_runs=False)
    assert harness.read_state() == (False, False)
    assert "event loop" in str(harness.liveness.unready_reason)
    harness.pass_time(1)
    assert harness.read_state() == (True, True)


@pytest.mark.parametrize("steps", [1, 50])
def test_step_beyond_its_limit_fails_liveness(steps: int) -> None:
    harness = LivenessHarness()
    harness.liveness.mark_ready()
    for _ in range(steps):
        harness.liveness.on_step_started()
        harness.pass_time(STEP_SECONDS - 1)
        assert harness.read_state() == (True, True)
        harness.liveness.on_step_finished()
    harness.liveness.on_step_started()
    harness.pass_time(STEP_SECONDS + 2)
    assert harness.read_state() == (False, False)
    assert "a step has run for" in str(harness.liveness.stall_reason)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]"])
def test_probes_listen_at_addresses_of_both_families(wildcard: str) -> None:
    harness = LivenessHarness()
    server = ProbeServer(f"{wildcard}:0", harness.liveness)
    for host in loopback_hosts():
        connection = HTTPConnection(host, int(server.target.rpartition(":")[2]), SECONDS)
        connection.request("GET", "/live")
        assert connection.getresponse().status == 200
        connection.close()
