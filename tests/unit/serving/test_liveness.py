"""When a server says that it lives, and when that it serves."""

from __future__ import annotations

import pytest

from modelswarm_serving.runtime.liveness import LOOP_SECONDS, STEP_SECONDS, Liveness


class Server:
    """A server's health, with a clock that is moved by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.health = Liveness(lambda: self.now)

    def pass_time(self, seconds: float, *, turning: bool = True) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            if turning:
                self.health.on_loop()

    def verdict(self) -> tuple[bool, bool]:
        """(lives, serves)"""
        return self.health.stall_reason is None, self.health.unready_reason is None


def test_loading_server_is_live_but_not_ready() -> None:
    server = Server()
    assert server.verdict() == (True, False)
    server.pass_time(24 * 3600, turning=False)
    assert server.verdict() == (True, False)
    assert server.health.unready_reason == "the model is being loaded"


def test_loaded_server_is_ready_until_it_stops() -> None:
    server = Server()
    server.health.mark_ready()
    server.pass_time(1000)
    assert server.verdict() == (True, True)
    server.health.mark_stopping()
    assert server.verdict() == (True, False)


def test_stalled_event_loop_fails_liveness_until_it_resumes() -> None:
    server = Server()
    server.health.mark_ready()
    server.pass_time(1)
    server.pass_time(LOOP_SECONDS - 1, turning=False)
    assert server.verdict() == (True, True)
    server.pass_time(3, turning=False)
    assert server.verdict() == (False, False)
    assert "event loop" in str(server.health.unready_reason)
    server.pass_time(1)
    assert server.verdict() == (True, True)


@pytest.mark.parametrize("steps", [1, 50])
def test_step_beyond_its_limit_fails_liveness(steps: int) -> None:
    server = Server()
    server.health.mark_ready()
    for _ in range(steps):
        server.health.on_step_started()
        server.pass_time(STEP_SECONDS - 1)
        assert server.verdict() == (True, True)
        server.health.on_step_finished()
    server.health.on_step_started()
    server.pass_time(STEP_SECONDS + 2)
    assert server.verdict() == (False, False)
    assert "a step has run for" in str(server.health.stall_reason)
