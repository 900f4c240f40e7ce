"""Program that forks processes with the modules that they need imported already.

`forked_process.py` starts this program and sends it one message per process: a module to run as `python -m` would. It
answers on a socket of that process: first with the pid, at the end with the exit code. Modules are imported when the
first process needs them. When the socket of the requests is closed, or this program ends in any other way, all its
children are killed. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass

MESSAGE_BYTES = 1 << 17  # most bytes of one request; below the kernel's limit for one datagram
MOST_FDS = 16  # most descriptors of one request
PR_SET_PDEATHSIG = 1  # prctl: the signal that the kernel sends when the parent ends


@dataclass(frozen=True, slots=True)
class Request:
    """One process to start."""

    module: str
    imports: list[str]  # imported before the fork
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    fds: dict[int, int]  # number in the child -> number here
    reply: socket.socket


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    server = os.getpid()
    request = serve(control)
    if request is None:
        os._exit(0)  # a full exit of torch takes seconds and prints warnings
    run_program(request, server)


def serve(control: socket.socket) -> Request | None:
    """Fork on each request. Return the request in the child, and None in this process at its end."""
    children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: pid, socket for its exit code
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            if fd != control.fileno():
                poller.unregister(fd)
                report_exit(fd, *children.pop(fd))
                continue
            request = receive(control)
            if request is None:
                for pid, _ in children.values():
                    os.kill(pid, signal.SIGKILL)
                for child in children.items():
                    report_exit(child[0], *child[1])
                return None
            pid = import_and_fork(request)
            if pid == 0:
                for pidfd, (_, reply) in children.items():
                    os.close(pidfd)
                    reply.close()
                request.reply.close()
                control.close()
                return request
            for each in request.fds.values():
                os.close(each)
            pidfd = os.pidfd_open(pid)
            poller.register(pidfd, select.POLLIN)
            children[pidfd] = pid, request.reply
            send(request.reply, pid)


def receive(control: socket.socket) -> Request | None:
    """Return the next request; None after the last."""
    data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MOST_FDS)
    if not data:
        return None
    fields = json.loads(data)
    reply, *others = fds
    numbers = dict(zip(fields.pop("fds"), others, strict=True))
    return Request(**fields, fds=numbers, reply=socket.socket(fileno=reply))


def import_and_fork(request: Request) -> int:
    """Return the child's pid, or 0 in the child."""
    fresh = [name for name in request.imports if name not in sys.modules]
    for name in fresh:
        importlib.import_module(name)
    if fresh:
        gc.collect()
        gc.freeze()  # a child that collects its garbage would copy the pages of all these objects
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1 or threading.active_count() != 1:
        raise RuntimeError(f"{threads} threads run, so no fork is safe: {threading.enumerate()}")
    return os.fork()


def report_exit(pidfd: int, pid: int, reply: socket.socket) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(pidfd)
    send(reply, os.waitstatus_to_exitcode(status))
    reply.close()


def send(reply: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test has dropped its process
        reply.send(str(number).encode())


def run_program(request: Request, server: int) -> None:
    """Run the program in the child. The interpreter ends as after `python -m`: with its exit handlers."""
    # A process group, as after an exec. A session would be scheduled as a unit, and get rid of a `nice` before pytest.
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        sys.exit("the fork server has ended")
    place_fds(request.fds)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    sys.argv[1:] = request.arguments
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


def place_fds(fds: dict[int, int]) -> None:
    """Give every descriptor its number in the child, and close the old numbers."""
    above = max(fds) + 1
    parked = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, above) for number, fd in fds.items()}
    for fd in fds.values():
        os.close(fd)
    for number, fd in parked.items():
        os.dup2(fd, number)
        os.close(fd)


if __name__ == "__main__":
    main()
