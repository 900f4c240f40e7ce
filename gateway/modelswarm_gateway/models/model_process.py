"""The processes of one model as the gateway sees them: its tokenizer.json and its template are untrusted.

Used by `tokenizer.py`; one for each model, so that none can stop, exhaust or delay the gateway or another model. The
processes (`model_worker.py`) have two lanes: small requests wait only for each other. A worker that exceeds its
processor time or memory ends, and the next request gets a new one. Requests wait in threads, one for each lane.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from modelswarm_gateway.models import model_worker
from modelswarm_gateway.models.model_worker import (
    COMMAND,
    EXIT_CODE,
    LOAD_BYTES,
    LOAD_CPU_SECONDS,
    OUT_OF_MEMORY,
)
from modelswarm_gateway.models.worker_messages import pack_message, receive_message

log = logging.getLogger(__name__)
# Processor time of one request; usual ones take less than 0.01 s.
CPU_SECONDS = 2.0
# Longest wait for a process to take a request or to answer; only a stopped machine takes as long.
ANSWER_SECONDS = 120.0
# Environment variables that the processes get, for their libraries and the time zone.
_PASSED_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ")

Answer: TypeAlias = tuple[dict[str, Any], bytes]  # head and data of a message


class ModelProcessError(Exception):
    """The processes cannot be started or do not answer, or prompts are refused for `retry_after` seconds."""

    def __init__(self, reason: str, retry_after: float = 1.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class BudgetError(Exception):
    """A request took too much time or memory, or made its process fail; `str()` goes on after "the tokenizer"."""

    def __init__(self, reason: str, is_rendered: bool = True) -> None:
        """`is_rendered`: the chat template is not the cause; it was rendered before, or not at all."""
        super().__init__(reason)
        self.is_rendered = is_rendered


@dataclass(frozen=True, slots=True)
class Lane:
    """A worker for requests of one size."""

    number: int
    mebibytes: int  # of memory that a request may need


# The worker stays. 64 KiB of text need 15 MiB.
SMALL = Lane(0, 64)
# The worker is new for each request. 2 Mi characters of text need 460 MiB.
LARGE = Lane(1, 512)


@dataclass(frozen=True, slots=True)
class Request:
    """A packed request, and the processor time that it may take."""

    content: bytes
    has_template: bool
    render_seconds: float
    encode_seconds: float


def pack_request(
    fields: dict[str, Any], render_seconds: float = CPU_SECONDS, encode_seconds: float = CPU_SECONDS
) -> Request:
    """Return a request for the worker. Raise ValueError or RecursionError if the fields cannot be JSON."""
    times = {"render_seconds": render_seconds, "encode_seconds": encode_seconds}
    return Request(
        pack_message(fields | times), "template" in fields, render_seconds, encode_seconds
    )


def child_environment() -> dict[str, str]:
    """Return this process's environment without what the processes do not need, such as tokens."""
    passed = {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}
    return passed | {"TOKENIZERS_PARALLELISM": "false"}


class ModelProcess:
    def __init__(self, tokenizer: bytes, eos: str | None, name: str) -> None:
        """Load `tokenizer`, a tokenizer.json. Call it in a thread. Raise ModelProcessError, BudgetError or ValueError.

        `eos`: text of the end token. `name`: the model's, for the log. `answer` and `table` are what the process
        reported of the tokenizer.
        """
        self._name = name
        self._lock = threading.Lock()  # of the control connection
        self._small: socket.socket | None = None
        own, other = socket.socketpair()
        try:
            with other:
                self._process = _start_process(other)
        except OSError as error:
            own.close()
            raise ModelProcessError(f"the model's process cannot be started: {error}") from error
        own.settimeout(ANSWER_SECONDS)
        self._control, self._sockets = own, [own]
        self._finalizer = weakref.finalize(self, _release, self._process, self._sockets)
        self.answer, self.table = self._load(tokenizer, eos)

    def _load(self, tokenizer: bytes, eos: str | None) -> tuple[dict[str, Any], bytes]:
        try:
            self._control.sendall(pack_message({"eos": eos}, tokenizer))
            loaded = receive_message(self._control)
        except OSError as error:  # TimeoutError is one
            self.close_connections()
            raise ModelProcessError(f"the model's process failed: {error}") from error
        if loaded is None:
            code = self._process.wait()
            self.close_connections()
            raise BudgetError(_end_reason(code, LOAD_CPU_SECONDS, LOAD_BYTES >> 20))
        if "fault" in loaded[0]:
            self.close_connections()
            raise ValueError(loaded[0]["fault"])
        return loaded

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End all processes of the model. A request that runs ends with them."""
        _kill(self._process)

    def close_connections(self) -> None:
        """End the processes and close the connections; on the thread of the small lane, which uses them."""
        with self._lock:
            self._finalizer()

    def ask(self, request: Request, lane: Lane) -> Answer:
        """Return the answer's head and data; one thread for each lane. Raise BudgetError or ModelProcessError."""
        try:
            connection = self._small if lane is SMALL else None
            connection = connection or self._start_worker(lane)
            answer, is_rendered = _exchange(connection, request)
            if answer is not None and lane is SMALL:
                return answer
            self._close_connection(connection)
            code = self._command(lane.number, 0)
        except OSError as error:  # TimeoutError is one
            self.close()
            raise ModelProcessError(f"the model's process failed: {error}") from error
        if answer is not None:
            return answer
        seconds = request.encode_seconds if is_rendered else request.render_seconds
        reason = _end_reason(code, seconds, lane.mebibytes)
        log.warning("a process of the model %s ended: it %s", self._name, reason)
        raise BudgetError(reason, is_rendered)

    def _start_worker(self, lane: Lane) -> socket.socket:
        own, other = socket.socketpair()
        try:
            with other:
                self._command(lane.number, lane.mebibytes, other)
        except BaseException:
            own.close()
            raise
        own.settimeout(ANSWER_SECONDS)
        self._sockets.append(own)
        if lane is SMALL:
            self._small = own
        return own

    def _close_connection(self, connection: socket.socket) -> None:
        if connection is self._small:
            self._small = None
        self._sockets.remove(connection)
        connection.close()

    def _command(self, lane: int, mebibytes: int, connection: socket.socket | None = None) -> int:
        with self._lock:
            passed = [] if connection is None else [connection.fileno()]
            socket.send_fds(self._control, [COMMAND.pack(lane, mebibytes)], passed)
            answer = self._control.recv(EXIT_CODE.size)
        if not answer:
            raise ConnectionResetError("it has ended")
        return int(EXIT_CODE.unpack(answer)[0])


def _exchange(connection: socket.socket, request: Request) -> tuple[Answer | None, bool]:
    """Return the answer, None if the worker has ended, and whether a template was rendered before."""
    is_rendered = not request.has_template
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(request.content)
        while (answer := receive_message(connection)) is not None:
            if "rendered" not in answer[0]:
                return answer, True
            is_rendered = True
    return None, is_rendered


def _start_process(connection: socket.socket) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", model_worker.__name__, str(connection.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[connection.fileno()],
        env=child_environment(),
        start_new_session=True,  # a terminal's Ctrl-C is for the gateway
    )


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)  # workers are in its group
        process.wait()
        # In a container the gateway is the first process: the workers are its children now.
        with suppress(ChildProcessError):
            while True:
                os.waitpid(-process.pid, 0)


def _release(process: subprocess.Popen[bytes], sockets: list[socket.socket]) -> None:
    _kill(process)
    for each in sockets:
        each.close()


def _end_reason(code: int, cpu_seconds: float, mebibytes: int) -> str:
    """Return the reason for the end of a process with this exit code."""
    if code == -signal.SIGPROF:
        return f"took more than {cpu_seconds:g} s of processor time"
    if code in (OUT_OF_MEMORY, -signal.SIGKILL, -signal.SIGABRT):  # Rust aborts without memory
        return f"needed more than {mebibytes} MiB of memory"
    cause = signal.Signals(-code).name if code < 0 else f"code {code}"
    return f"ended its process with {cause}"
