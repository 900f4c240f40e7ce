"""Whether processes live, for tests that kill them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def group_alive(leader: int) -> bool:
    """Whether any process is left of the group that `leader` began, be it dead itself."""
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return False
    return True


def gone_within(pids: Sequence[int], seconds: float, lives: Callable[[int], bool] = alive) -> bool:
    deadline = time.monotonic() + seconds
    while any(lives(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children(parent: int) -> list[int]:
    """Of a process, by the kernel's own list."""
    listed = subprocess.run(
        ("ps", "-A", "-o", "pid=,ppid="), capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, of in pairs if int(of) == parent]
