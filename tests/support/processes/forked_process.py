"""Starts servers, gateways and operators as forks of one process that has imported everything.

`fork_process` takes the command of an exec and has the signature of the product's `Spawn`. The process has the same
arguments, environment, descriptors, signals and exit code as after an exec, in a tenth of the time. Tests of the start
itself, of memory, and of environment variables that are read at import use exec.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from modelswarm.local.commands import child_environment

FORK_SERVER = Path(__file__).with_name("fork_server.py")
START_SECONDS = 400.0  # seconds for a start; the first one imports everything
END_SECONDS = 120.0  # seconds for the fork server to kill its children
SAVE_SECONDS = (
    5.0  # seconds for a measured process to end by itself; a second SIGTERM ends a gateway at once
)
MEASURED_SIGNALS = (signal.SIGTERM, signal.SIGTERM) if "COVERAGE_FILE" in os.environ else ()
IMPORTS = {
    "modelswarm_gateway": (
        "modelswarm_gateway.app",
        "modelswarm_gateway.discovery.kubernetes_source",
    ),
    "modelswarm_operator": ("modelswarm_operator.app",),
    "modelswarm_serving": ("modelswarm_serving.app",),
}  # by program: modules that it imports before it serves. `__main__` itself is run in the child.
TORCH_IMPORTS = ("modelswarm_serving.model.transformer.startup",)
READ_AT_IMPORT = ("HF_", "TRANSFORMERS_", "TORCH_", "OMP_", "MKL_", "OPENBLAS_", "PYTHONPATH")
"""Prefixes of variables that have no effect once a library is imported."""
_STARTING = threading.Lock()


class ForkedProcess:
    """The part of `subprocess.Popen` that tests use, for a child of the fork server. Thread-safe."""

    def __init__(self, pid: int, reply: socket.socket) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._reply = reply
        weakref.finalize(self, reply.close)

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while it runs."""
        if self.returncode is None and self._has_ended(0.0):
            # MSG_PEEK: another thread may read the exit code at the same time.
            code = self._reply.recv(64, socket.MSG_PEEK)
            self.returncode = int(code) if code else -signal.SIGKILL  # by the fork server
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._has_ended(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int, /) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self) -> None:
        """End the process by SIGKILL, and wait. With coverage by SIGTERM first, so that it saves its lines."""
        for number in (*MEASURED_SIGNALS, signal.SIGKILL):
            self.send_signal(number)
            if self._has_ended(END_SECONDS if number == signal.SIGKILL else SAVE_SECONDS):
                break
        self.wait(END_SECONDS)

    def _has_ended(self, seconds: float | None) -> bool:
        poller = select.poll()
        poller.register(self._reply, select.POLLIN)
        return bool(poller.poll(None if seconds is None else seconds * 1000))


class ForkServer:
    """The process that forks. It ends with this process, and its children end with it."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = child_environment(1)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-u", str(FORK_SERVER), str(theirs.fileno())),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C reaches only the tests, which end the fork server
            )
        atexit.register(self.close)

    def start(
        self,
        module: str,
        imports: Sequence[str],
        arguments: Sequence[str],
        env: Mapping[str, str],
        fds: Mapping[int, int],
    ) -> ForkedProcess:
        """Start `python -m MODULE`. `fds`: number in the child -> number here."""
        for name, value in env.items():
            if name.startswith(READ_AT_IMPORT) and self._environment.get(name) != value:
                raise ValueError(f"{name}={value} is read at import: start this process by exec")
        request = {
            "module": module,
            "imports": list(imports),
            "arguments": list(arguments),
            "environment": dict(env),
            "folder": str(Path.cwd()),
            "fds": list(fds),
        }
        reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            message = json.dumps(request).encode()
            socket.send_fds(self._control, [message], [theirs.fileno(), *fds.values()])
        reply.settimeout(START_SECONDS)
        pid = reply.recv(64)
        if not pid:
            reply.close()
            raise RuntimeError(f"the fork server has ended with {self._process.wait(END_SECONDS)}")
        reply.settimeout(None)
        return ForkedProcess(int(pid), reply)

    def close(self) -> None:
        self._control.close()
        self._process.wait(END_SECONDS)


@functools.cache
def _fork_server(with_torch: bool) -> ForkServer:
    """Return this test run's fork server. Gateways have one without torch."""
    return ForkServer()


def fork_process(
    command: Sequence[str],
    env: Mapping[str, str],
    output: BinaryIO | int,
    *inherited_fds: int,
) -> ForkedProcess:
    """Start `PYTHON [-P] -m MODULE ...`. The descriptors keep their numbers; stdout and stderr are `output`."""
    python, *words = command
    if words[0] == "-P":
        del words[0]
    if python != sys.executable or words[0] != "-m":
        raise ValueError(f"{' '.join(command)} does not run a module of this interpreter")
    module, arguments = words[1], words[2:]
    needs_torch = module == "modelswarm_serving" and "--hash-model" not in arguments
    imports = (*IMPORTS[module], *(TORCH_IMPORTS if needs_torch else ()))
    with _STARTING:
        server = _fork_server(needs_torch)
    target = output if isinstance(output, int) else output.fileno()
    with open(os.devnull, "rb") as nothing:
        fds = {0: nothing.fileno(), 1: target, 2: target, **{fd: fd for fd in inherited_fds}}
        return server.start(module, imports, arguments, env, fds)
