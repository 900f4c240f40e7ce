"""Server processes for tests, forked by `fork_server.py` and always killed at the end; and the state of any process.

Used by tests that talk to servers over links, without a gateway process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.processes.forked_process import ForkedProcess, fork_process

from modelswarm.protocol.identity import Address

START_DEADLINE = 300.0  # seconds for a start; torch imports slowly on a busy machine
STDERR = 2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class ServerProcess:
    member: dict[str, Any]
    process: ForkedProcess
    file: Path  # in the members folder

    @property
    def address(self) -> Address:
        return Address(self.member["peer"], self.member["target"])

    async def exit_code(self, deadline: float = 120.0) -> int:
        return await asyncio.to_thread(self.process.wait, deadline)


def command(members: Path, name: str, blocks: str, *flags: str) -> list[str]:
    fixed = ["--discovery-dir", str(members), "--name", name, "--blocks", blocks, "--threads", "1"]
    return [sys.executable, "-m", "modelswarm_serving", *fixed, *flags]


@contextlib.asynccontextmanager
async def servers(
    members: Path, spans: Sequence[str], *flags: str, pass_fds: Sequence[int] = ()
) -> AsyncIterator[list[ServerProcess]]:
    """Yield one ready server per span ("0:4"), named s0, s1 ..."""
    processes: list[ForkedProcess] = []
    try:
        for i, span in enumerate(spans):
            arguments = command(members, f"s{i}", span, *flags)
            processes.append(fork_process(arguments, ENVIRONMENT, STDERR, *pass_fds))
        yield [await _ready(members / f"s{i}.json", p) for i, p in enumerate(processes)]
    finally:
        for process in processes:
            process.end()


async def _ready(file: Path, process: ForkedProcess) -> ServerProcess:
    async with asyncio.timeout(START_DEADLINE):
        while (member := _read(file)) is None:
            assert process.poll() is None, "the server ended before it was ready"
            await asyncio.sleep(0.02)
    return ServerProcess(member, process, file)


def _read(file: Path) -> dict[str, Any] | None:
    if not file.exists():
        return None
    member: dict[str, Any] = json.loads(file.read_text())
    return member


async def refusal(*arguments: str) -> tuple[int, str]:
    """Return exit code and stderr of a server that must refuse to start."""
    process = await asyncio.create_subprocess_exec(
        *arguments, env=ENVIRONMENT, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(START_DEADLINE):
            _, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, stderr.decode()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def group_alive(leader: int) -> bool:
    """Return True if any process of the group that `leader` began still runs, even if `leader` has ended."""
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
    """Return the children of a process, as the kernel lists them."""
    listed = subprocess.run(
        ("ps", "-A", "-o", "pid=,ppid="), capture_output=True, text=True, check=True
    )
    pairs = [line.split() for line in listed.stdout.splitlines()]
    return [int(pid) for pid, of in pairs if int(of) == parent]
