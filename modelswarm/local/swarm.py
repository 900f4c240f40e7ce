"""A swarm as processes of this machine: one server for every slot of a plan, and its gateways.

`with LocalSwarm(plan) as swarm:` starts the processes, and removes them and their files at the end. Used by
`modelswarm up`, `modelswarm demo`, benchmarks and tests; all use this class, so that the tested code is the code that
runs. Does not know Kubernetes.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from modelswarm.client.swarm import SwarmClient, SwarmClientError
from modelswarm.errors import UserError
from modelswarm.local.child_process import Spawn, read_log_tail, spawn_process
from modelswarm.local.commands import (
    LocalSettings,
    child_environment,
    gateway_command,
    gateway_names,
    server_command,
    threads_per_server,
)
from modelswarm.local.ports import any_port, check_addresses_free
from modelswarm.local.run_folder import (
    GATEWAY_JOB,
    GatewayAddresses,
    RunFolder,
    RunInfo,
    StartInfo,
)
from modelswarm.local.start_state import (
    IMPORTING,
    describe_progress,
    gateway_progress,
    read_server_progress,
)
from modelswarm.local.supervisor import (
    POLL_SECONDS,
    Job,
    JobChange,
    JobState,
    JobStatus,
    RestartBackoff,
    StartError,
    Supervisor,
)
from modelswarm.placement.plan import SwarmPlan
from modelswarm.placement.slots import Slot, coverage, slots_of
from modelswarm.process.run_files import (
    GatewayFile,
    ServerFile,
    clear_run_file,
    read_gateway_file,
    read_server_file,
)
from modelswarm.process.start_progress import StartProgress
from modelswarm.protocol.identity import PeerId

GATEWAY_STOP_RANK = 0  # the gateway stops first: it can still end its clients' streams
SERVER_STOP_RANK = 1
GATEWAY_ANSWER_SECONDS = 1.0  # while it starts: one that does not answer is reported
MAX_REPLACED_GATEWAYS = 16  # the last ones; a gateway may end before it has reached every server


@dataclasses.dataclass(frozen=True, slots=True)
class LocalServer:
    """A slot and the process in it. `member` is set while the server is ready."""

    slot: Slot
    job_status: JobStatus
    member: ServerFile | None
    progress: StartProgress = IMPORTING  # of its present process, while that starts


class LocalSwarm:
    def __init__(
        self,
        plan: SwarmPlan,
        settings: LocalSettings | None = None,
        listener: Callable[[JobChange], None] = lambda change: None,
        spawn: Spawn = spawn_process,
    ) -> None:
        self.plan = plan
        self.slots = slots_of(plan.name, plan.spans, plan.replicas)
        self._settings = settings or LocalSettings()
        self._listener, self._spawn = listener, spawn
        self._folder: RunFolder | None = None
        self._supervisor: Supervisor | None = None
        self._gateway_names = gateway_names(self._settings.gateways)
        self._gateways: dict[str, GatewayFile] = {}  # as last announced
        self._ended_gateways: dict[PeerId, None] = {}  # reaped processes, oldest first

    def start(self) -> RunInfo:
        """Start all processes and wait until they serve. If anything fails, no process is left running."""
        if not self.slots:
            raise UserError("spec.replicas", "0 suspends the swarm; allowed to start it: 1 or more")
        wanted = self._settings
        check_addresses_free(
            {
                "--http": wanted.http,
                "--grpc": wanted.grpc,
                "--metrics": wanted.metrics,
                "--admin": wanted.admin,
            }
        )
        self._folder = RunFolder.claim(wanted.run_name or self.plan.name)
        try:
            if self.plan.chat_template is not None:
                self._folder.chat_template.write_text(self.plan.chat_template, encoding="utf-8")
            if wanted.publish:
                self._folder.announce(self._start_info())
            self._supervisor = self._new_supervisor(self._folder)
            self._supervisor.start(wanted.start_timeout)
            self._wait_linked(wanted.start_timeout, self._folder)
            info = self._run_info()
            if wanted.publish:
                self._folder.publish(info)
        except BaseException as error:
            kept = self._keep_logs(error)
            self.stop()
            if kept is not None:
                raise StartError(f"{error}\n  all logs are kept in {kept}") from None
            raise
        return info

    def stop(self) -> None:
        """Stop all processes and remove the files. May be called twice, or after a failed start."""
        if self._supervisor is not None:
            self._supervisor.stop()
        if self._folder is not None:
            self._folder.release()

    def _keep_logs(self, error: BaseException) -> Path | None:
        """Stop the processes and keep their logs, if a person is to read them; return their folder."""
        if not isinstance(error, StartError) or error.is_user_error or not self._settings.publish:
            return None
        if self._supervisor is None or self._folder is None:
            return None
        self._supervisor.stop()
        return self._folder.keep_logs()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def http(self) -> str:
        """The first gateway's HTTP address, `host:port`."""
        return self.gateway_addresses[0].http

    @property
    def grpc(self) -> str:
        return self.gateway_addresses[0].grpc

    @property
    def metrics(self) -> str:
        return self.gateway_addresses[0].metrics

    @property
    def admin(self) -> str:
        """The first gateway's address for status, routes and drains."""
        return self.gateway_addresses[0].admin

    @property
    def gateway_addresses(self) -> tuple[GatewayAddresses, ...]:
        if GATEWAY_JOB not in self._gateways:
            raise RuntimeError("the swarm has not been started")
        known = self._gateways
        return tuple(
            GatewayAddresses(name, at.http, at.grpc, at.metrics, at.admin)
            for name, at in ((name, known[name]) for name in self._gateway_names)
        )

    @property
    def logs(self) -> Path:
        """The folder of the processes' logs, `NAME-INCARNATION.log`."""
        if self._folder is None:
            raise RuntimeError("the swarm has not been started")
        return self._folder.logs

    @property
    def servers(self) -> tuple[LocalServer, ...]:
        jobs = {job.name: job for job in self._started.job_statuses()}
        return tuple(
            LocalServer(
                slot,
                jobs[slot.name],
                self._member_of(jobs[slot.name]),
                self._progress_of(jobs[slot.name]),
            )
            for slot in self.slots
        )

    @property
    def has_processes(self) -> bool:
        """True from the moment at which processes are started."""
        return self._supervisor is not None

    @property
    def gateways(self) -> tuple[JobStatus, ...]:
        jobs = self._started.job_statuses()
        return tuple(job for job in jobs if job.name in self._gateway_names)

    @property
    def gateway(self) -> JobStatus:
        """The first gateway."""
        return self.gateways[0]

    @property
    def coverage(self) -> int:
        """The number of ready servers of the block that has the fewest."""
        serving = (
            server.slot.span for server in self.servers if server.job_status.state is JobState.READY
        )
        return coverage(self.plan.spans, serving)

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> JobStatus:
        """Send a signal to a server or a gateway; return its status before. It is restarted after its back-off."""
        return self._started.send_signal(name, number)

    def wait_ready(self, timeout: float) -> bool:
        """Wait until every server and gateway is ready; False after `timeout` seconds."""
        return self._started.wait_until(
            lambda: all(job.state is JobState.READY for job in self._started.job_statuses()),
            timeout,
        )

    def wait_replaced(self, name: str, incarnation: int, timeout: float) -> bool:
        """Wait until a later incarnation of a job is ready; False after `timeout` seconds."""

        def replaced() -> bool:
            return any(
                job.name == name and job.incarnation > incarnation and job.state is JobState.READY
                for job in self._started.job_statuses()
            )

        return self._started.wait_until(replaced, timeout)

    def raise_if_failed(self) -> None:
        """Raise the exception that ended the supervisor's thread, if one did."""
        self._started.raise_if_failed()

    @property
    def _started(self) -> Supervisor:
        if self._supervisor is None:
            raise RuntimeError("the swarm has not been started")
        return self._supervisor

    def _wait_linked(self, timeout: float, folder: RunFolder) -> None:
        """Wait until every gateway has a link to every server and the model's tokenizer.

        `timeout`: seconds without progress.
        """
        for job, gateway in zip(self.gateways, self.gateway_addresses, strict=True):
            seen, deadline = None, 0.0
            with SwarmClient(gateway.admin) as client:
                while not (progress := self.fetch_gateway_progress(client)).is_ready:
                    self.raise_if_failed()
                    if (progress.phase, progress.done) != seen:
                        seen = progress.phase, progress.done
                        deadline = time.monotonic() + timeout
                    elif time.monotonic() > deadline:
                        log = folder.logs / f"{job.name}-{job.incarnation}.log"
                        raise StartError(_describe_late_gateway(job.name, progress, timeout, log))
                    time.sleep(POLL_SECONDS)

    def gateway_target(self, name: str) -> str | None:
        """Return the admin address of a gateway; None until its ports are open."""
        known = self._gateways.get(name)
        return None if known is None else known.admin

    def fetch_gateway_progress(self, client: SwarmClient) -> StartProgress:
        """Return what the gateway still waits for; `ready` once it serves the model on all servers."""
        names = [slot.name for slot in self.slots]
        try:
            return gateway_progress(client.fetch_snapshot(GATEWAY_ANSWER_SECONDS), names)
        except SwarmClientError as error:
            return gateway_progress(None, names, str(error))

    def _start_info(self) -> StartInfo:
        name = self._settings.run_name or self.plan.name
        blocks = {slot.name: str(slot.span) for slot in self.slots}
        return StartInfo(name, os.getpid(), blocks, self._gateway_names)

    def _run_info(self) -> RunInfo:
        first, *others = self.gateway_addresses
        return RunInfo(
            name=self._settings.run_name or self.plan.name,
            model=self.plan.served_name,
            pid=os.getpid(),
            http=first.http,
            grpc=first.grpc,
            metrics=first.metrics,
            admin=first.admin,
            other_gateways=tuple(others),
        )

    def _member_of(self, job: JobStatus) -> ServerFile | None:
        if job.state is not JobState.READY or self._folder is None:
            return None
        return read_server_file(self._folder.members, job.name)

    def _progress_of(self, job: JobStatus) -> StartProgress:
        if job.state is not JobState.STARTING or self._folder is None:
            return IMPORTING
        return read_server_progress(self._folder.starts / f"{job.name}.json", job.pid)

    def _new_supervisor(self, folder: RunFolder) -> Supervisor:
        jobs = [self._gateway_job(folder, name) for name in self._gateway_names]
        jobs += [self._server_job(folder, slot) for slot in self.slots]
        env = child_environment(threads_per_server(self.plan, self._settings))
        limit = self._settings.restart_limit

        def backoff() -> RestartBackoff:
            return RestartBackoff(min(0.5, limit), limit)

        return Supervisor(jobs, env, folder.logs, self._listener, backoff, self._spawn)

    def _server_job(self, folder: RunFolder, slot: Slot) -> Job:
        def command(incarnation: int, parent_fd: int) -> list[str]:
            return server_command(self.plan, slot, self._settings, folder, incarnation, parent_fd)

        def ready(pid: int) -> bool:
            member = read_server_file(folder.members, slot.name)
            return member is not None and member.pid == pid

        def forget() -> None:
            clear_run_file(folder.members / f"{slot.name}.json")
            clear_run_file(folder.starts / f"{slot.name}.json")

        def describe(pid: int) -> str:
            return describe_progress(read_server_progress(folder.starts / f"{slot.name}.json", pid))

        return Job(slot.name, command, ready, forget, SERVER_STOP_RANK, describe)

    def _gateway_job(self, folder: RunFolder, name: str) -> Job:
        run_file = folder.gateway_file(name)

        def command(incarnation: int, parent_fd: int) -> list[str]:
            settings, replaces = self._gateway_settings(name), tuple(self._ended_gateways)
            return gateway_command(self.plan, settings, folder, parent_fd, name, replaces)

        def ready(pid: int) -> bool:
            announced = read_gateway_file(run_file)
            if announced is None or announced.pid != pid:
                return False
            self._gateways[name] = announced
            return True

        def forget() -> None:
            # The supervisor calls this only once the process is reaped. Servers need not await its lease then.
            for ended in (self._gateways.get(name), read_gateway_file(run_file)):
                if ended is not None and ended.peer:
                    self._ended_gateways[ended.peer] = None
            for oldest in list(self._ended_gateways)[:-MAX_REPLACED_GATEWAYS]:
                del self._ended_gateways[oldest]
            clear_run_file(run_file)

        return Job(name, command, ready, forget, GATEWAY_STOP_RANK)

    def _gateway_settings(self, name: str) -> LocalSettings:
        """Return the settings with the addresses of one gateway. When restarted, it keeps them for its clients."""
        wanted, known = self._settings, self._gateways.get(name)
        first = (wanted.http, wanted.grpc, wanted.metrics, wanted.admin)
        if known is not None:
            http, grpc, metrics, admin = known.http, known.grpc, known.metrics, known.admin
        elif name == GATEWAY_JOB:
            http, grpc, metrics, admin = first
        else:
            http, grpc, metrics, admin = map(any_port, first)
        return dataclasses.replace(wanted, http=http, grpc=grpc, metrics=metrics, admin=admin)


def _describe_late_gateway(name: str, progress: StartProgress, timeout: float, log: Path) -> str:
    """Return the sentence about a gateway that makes no progress, with the last lines of its log."""
    lines = "".join(f"\n  {line}" for line in read_log_tail(log))
    phase = describe_progress(progress)
    return f"{name} made no progress for {timeout:g} s: {phase}; its last lines:{lines}"
