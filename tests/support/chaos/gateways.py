"""More gateways over the same servers than the one that `LocalSwarm` runs, and their addresses.

Used by `swarm.py`. They find the servers in the same discovery folder. A restarted gateway listens at its old
addresses. Gateways learn of each other only from servers.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from chaos.schedule import GATEWAY
from support.processes.forked_process import fork_process
from support.processes.swarm import READY_SECONDS

from modelswarm.local.commands import child_environment
from modelswarm.local.supervisor import Job, JobChange, JobStatus, RestartBackoff, Supervisor
from modelswarm.process.run_files import GatewayFile, read_gateway_file

RESTART_SECONDS = 0.1
ANYWHERE = "127.0.0.1:0"


def gateway_names(count: int) -> tuple[str, ...]:
    return (GATEWAY, *(f"{GATEWAY}-{number}" for number in range(2, count + 1)))


class MoreGateways:
    """The gateways after the first."""

    def __init__(
        self,
        names: Sequence[str],
        folder: Path,
        flags: Sequence[str],
        listener: Callable[[JobChange], None],
    ) -> None:
        """Prepare gateways of the running swarm in `folder`."""
        self._folder, self._flags = folder, tuple(flags)
        self._announced: dict[str, GatewayFile] = {}
        env = child_environment(1)
        self._supervisor = Supervisor(
            [self._job(name) for name in names],
            env,
            folder / "logs",
            listener,
            lambda: RestartBackoff(RESTART_SECONDS, RESTART_SECONDS),
            fork_process,
        )
        self.names = tuple(names)

    def start(self) -> None:
        if self.names:
            self._supervisor.start(READY_SECONDS)

    def stop(self) -> None:
        if self.names:
            self._supervisor.stop()

    def kill(self, name: str, number: signal.Signals) -> JobStatus:
        return self._supervisor.send_signal(name, number)

    def announced(self, name: str) -> GatewayFile:
        """Return the run file of a gateway: its addresses."""
        return self._announced[name]

    def _job(self, name: str) -> Job:
        announce = self._folder / f"{name}.json"

        def command(incarnation: int, parent_fd: int) -> list[str]:
            known = self._announced.get(name)
            flags = {
                "--discovery-dir": str(self._folder / "members"),
                "--http": known.http if known else ANYWHERE,
                "--grpc": known.grpc if known else ANYWHERE,
                "--metrics": known.metrics if known else ANYWHERE,
                "--admin": known.admin if known else ANYWHERE,
                "--name": name,
                "--run-file": str(announce),
                "--parent-fd": str(parent_fd),
            }
            module = [sys.executable, "-P", "-m", "modelswarm_gateway"]
            return [*module, *(part for flag in flags.items() for part in flag), *self._flags]

        def ready(pid: int) -> bool:
            found = read_gateway_file(announce)
            if found is None or found.pid != pid:
                return False
            self._announced[name] = found
            return True

        return Job(name, command, ready, lambda: announce.unlink(missing_ok=True))
