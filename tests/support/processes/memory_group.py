"""Control groups with a memory limit, version 1 or 2, to run processes under a container's limit.

Used by tests of the memory plan. Needs root and a writable `/sys/fs/cgroup`; without them the test is skipped.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pytest
from support.eventually import eventually
from support.processes.streams import Request

from modelswarm.local.child_process import Process, spawn_process
from modelswarm.placement.plan import PAGE_SIZE, admissible_pages
from modelswarm.protocol.messages import Sampling

GROUPS = Path("/sys/fs/cgroup")
SERVER = "modelswarm_serving"
NEW = 48  # tokens of an answer that fills pages
AT_ONCE = 4  # concurrent answers: each must end within the streams' deadline on a busy machine
END_SECONDS = 120.0  # seconds for the kernel to release a group whose processes have ended


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    folder: Path

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs `command` inside this group from its start."""
        enter = 'echo $$ > "$0" && exec "$@"'
        return ["/bin/sh", "-c", enter, str(self.folder / "cgroup.procs"), *command]

    def kills(self) -> int:
        """Return the number of processes that the kernel killed for lack of memory."""
        counted = self.folder / "memory.events"
        if not counted.exists():
            counted = self.folder / "memory.oom_control"
        values = dict(line.split() for line in counted.read_text().splitlines())
        return int(values["oom_kill"])

    def peak(self) -> int:
        """Return the highest charge in bytes, with the page cache."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (self.folder / name).exists():
                return int((self.folder / name).read_text())
        return 0


@contextmanager
def memory_group(limit: int) -> Iterator[MemoryGroup]:
    """Yield a group with this limit; remove it when its processes have ended."""
    version_one = GROUPS / "memory"
    folder = (version_one if version_one.is_dir() else GROUPS) / f"modelswarm-{uuid.uuid4().hex}"
    try:
        folder.mkdir()
        limit_file = "memory.limit_in_bytes" if version_one.is_dir() else "memory.max"
        (folder / limit_file).write_text(str(limit))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"control groups with a memory limit cannot be made here: {error}")
    try:
        yield MemoryGroup(folder)
    finally:
        eventually("its processes have ended", lambda: _is_removed(folder), END_SECONDS)


def _is_removed(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


class LimitedServers:
    """A `Spawn` that puts each server of a local swarm into a group of its own."""

    def __init__(self, limit: int) -> None:
        self.groups: dict[str, MemoryGroup] = {}
        self._limit = limit
        self._stack = ExitStack()

    def __enter__(self) -> LimitedServers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def __call__(
        self, command: Sequence[str], env: Mapping[str, str], output: BinaryIO, inherited_fd: int
    ) -> Process:
        if SERVER in command:
            name = command[command.index("--name") + 1]
            if name not in self.groups:
                self.groups[name] = self._stack.enter_context(memory_group(self._limit))
            command = self.groups[name].wrap(command)
        return spawn_process(command, {**os.environ, **env}, output, inherited_fd)


def filling_asks(pages: int, context: int, model: str) -> list[list[Request]]:
    """Return requests, a few at a time, whose named sessions fill all admissible pages."""
    room = admissible_pages(pages) * PAGE_SIZE
    lengths = [min(context, room - start) for start in range(0, room, context)]
    asks = [
        Request((5, *[20 + index % 200] * (length - NEW - 2)), NEW,
            Sampling(temperature=1.0, top_p=0.95, seed=7), session=f"full-{index}", model=model)
        for index, length in enumerate(lengths)
        if length > 2 * NEW
    ]  # fmt: skip
    return [asks[start : start + AT_ONCE] for start in range(0, len(asks), AT_ONCE)]
