"""The periodic jobs of a gateway: an error ends none of them, and does not fill the log."""

from __future__ import annotations

import asyncio

import pytest

from modelswarm_gateway.app import ERROR_SECONDS, run_every


async def test_job_that_always_fails_is_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now, calls = 0.0, 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise ValueError("broken")

    task = asyncio.create_task(run_every(0.0, fail, lambda: now))
    for minute in range(3):
        now = minute * ERROR_SECONDS
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(caplog.records) == minute + 1
    task.cancel()
    assert calls > 20
    assert caplog.records[0].exc_info is not None
