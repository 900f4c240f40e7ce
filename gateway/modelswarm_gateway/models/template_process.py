"""Compiles and renders templates in a child process, so that no template can stop or exhaust the gateway.

Used by `tokenizer.py`; one for each gateway. The child (`template_worker.py`) starts at the first use, and again after
it ended: it ends when a template exceeds its processor time or memory. A memory fault counts if the child has served no
other template. Requests wait for each other in a thread.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from modelswarm_gateway.models import template_worker
from modelswarm_gateway.models.chat_template import TemplateError
from modelswarm_gateway.models.template_worker import (
    CPU_SECONDS,
    MEMORY_BYTES,
    OUT_OF_MEMORY,
    receive_message,
    send_message,
)

log = logging.getLogger(__name__)
# Longest wait for the child to take a request or to answer; only a stopped machine takes as long.
ANSWER_SECONDS = 60.0
# Environment variables that the child gets, for its libraries and the time zone.
_PASSED_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "TZ")


class TemplateBudgetError(TemplateError):
    """The template took too much time or memory."""

    def __init__(self, message: str, request_bytes: int) -> None:
        super().__init__(message)
        self.request_bytes = request_bytes


class TemplateProcessError(Exception):
    """The child cannot be started or does not answer, for no reason of the template's."""


def child_environment() -> dict[str, str]:
    """Return this process's environment without what the child does not need, such as tokens."""
    return {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ}


class _Child:
    def __init__(self, cpu_seconds: float) -> None:
        own, other = socket.socketpair()
        try:
            with other:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        template_worker.__name__,
                        str(other.fileno()),
                        str(cpu_seconds),
                    ],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    env=child_environment(),
                    start_new_session=True,  # a terminal's Ctrl-C is for the gateway
                )
        except BaseException:
            own.close()
            raise
        own.settimeout(ANSWER_SECONDS)
        self._connection = own
        self.templates: set[int] = set()  # hashes of those that it has compiled

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any] | None, int]:
        """Return the answer, None if the child has ended, and the request's bytes. TimeoutError if it is stopped."""
        self.templates.add(hash(request["template"]))
        size = send_message(self._connection, request)
        try:
            content = receive_message(self._connection)
        except ConnectionResetError:  # it ended before it had read all
            content = None
        return None if content is None else json.loads(content), size

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """End the process if it has not ended; return its exit code, negative for a signal."""
        self._connection.close()
        try:
            return self._process.wait(timeout=ANSWER_SECONDS)  # it ends when its connection does
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


class TemplateProcess:
    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        """`cpu_seconds`: processor time of one request."""
        self._cpu_seconds = cpu_seconds
        self._executor = ThreadPoolExecutor(1, "templates")
        self._child: _Child | None = None
        self._finalizer: weakref.finalize[..., Any] | None = (
            None  # ends the child of an object that is not closed
        )

    def check(self, template: str) -> None:
        """Compile a template; may be called in any thread. Raise TemplateError or TemplateProcessError."""
        self._executor.submit(self._ask, {"template": template}).result()

    async def render(self, template: str, variables: dict[str, Any]) -> str:
        """Return the prompt. Raise TemplateError or TemplateProcessError."""
        request = {"template": template, "variables": variables}
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._ask, request)

    def close(self) -> None:
        """End the child. A request that runs ends with it."""
        self._executor.submit(self._end_child)
        self._executor.shutdown(wait=False)

    def _end_child(self) -> int:
        child, self._child = self._child, None
        if self._finalizer is not None:
            self._finalizer.detach()
        return 0 if child is None else child.end()

    def _ask(self, request: dict[str, Any]) -> str:
        if self._child is not None and not self._child.is_running:
            self._end_child()
        try:
            if self._child is None:
                self._child = _Child(self._cpu_seconds)
                self._finalizer = weakref.finalize(self, self._child.end)
            answer, size = self._child.ask(request)
        except (RecursionError, ValueError) as error:
            raise TemplateError(f"the messages cannot be given to a template: {error}") from error
        except OSError as error:  # TimeoutError is one
            self._end_child()
            raise TemplateProcessError(f"the template process failed: {error}") from error
        if answer is None:
            is_shared, code = len(self._child.templates) > 1, self._end_child()
            if is_shared and code != -signal.SIGPROF:
                return self._ask(request)  # others may have filled its memory
            reason = self._budget_sentence(code)
            log.warning("the template process ended: %s", reason)
            raise TemplateBudgetError(f"the model's chat template {reason}", size)
        if "refused" in answer:
            raise TemplateError(answer["refused"])
        return str(answer["text"])

    def _budget_sentence(self, code: int) -> str:
        """Return the reason for the end of the child with this exit code."""
        if code == -signal.SIGPROF:
            return f"took more than {self._cpu_seconds:g} s of processor time"
        if code in (OUT_OF_MEMORY, -signal.SIGKILL):
            return f"needed more than {MEMORY_BYTES >> 20} MiB of memory"
        cause = signal.Signals(-code).name if code < 0 else f"code {code}"
        return f"ended its process with {cause}"
