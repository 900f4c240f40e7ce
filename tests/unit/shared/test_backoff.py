"""Delays of the supervisor before it restarts a process that ended."""

from __future__ import annotations

from modelswarm.local.supervisor import RestartBackoff


def test_restart_delays_double_up_to_the_maximum() -> None:
    backoff = RestartBackoff()

    waits = [backoff.next_delay(ran=1.0) for _ in range(9)]

    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_restart_delay_resets_after_a_minute_of_uptime() -> None:
    backoff = RestartBackoff()
    for _ in range(5):
        backoff.next_delay(ran=0.1)

    assert backoff.next_delay(ran=59.9) == 16.0
    assert backoff.next_delay(ran=60.0) == 0.5
    assert backoff.next_delay(ran=0.1) == 1.0
