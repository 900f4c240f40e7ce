"""Checks grammars in a child process, so that no schema can stop or exhaust the gateway.

One for each gateway. The child (`check_worker.py`) starts at the first use, and again after it ended: it ends when a
grammar exceeds its processor time or memory. Requests wait for each other in a thread; the last ones are remembered.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import subprocess
import sys
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from modelswarm.protocol.messages import Grammar
from modelswarm.protocol.sampling import MAX_GRAMMAR_BYTES
from modelswarm_gateway.errors import ApiError, Code, invalid_request
from modelswarm_gateway.generation.grammar import check_worker
from modelswarm_gateway.generation.grammar.check_worker import CPU_SECONDS
from modelswarm_gateway.generation.grammar.lark import placeholders
from modelswarm_gateway.generation.grammar.source import GrammarKind, GrammarPart, GrammarSource
from modelswarm_gateway.models.model_process import ANSWER_SECONDS, child_environment
from modelswarm_gateway.models.worker_messages import pack_message, receive_message

log = logging.getLogger(__name__)
VERSION = f"llguidance {version('llguidance')}"
MAX_WAITING = 64  # requests that may wait for the child
REMEMBERED_BYTES = 8 << 20  # of sources and grammars that were accepted


class GrammarRefused(Exception):
    """The grammar cannot be used; the text says why. `param`: field of the part that is to blame, if one is."""

    def __init__(self, reason: str, param: str = "") -> None:
        super().__init__(reason)
        self.param = param


class GrammarProcessError(Exception):
    """The child cannot be started or is busy, for no reason of the grammar's."""


class GrammarProcess:
    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        """`cpu_seconds`: processor time of one request."""
        self._cpu_seconds = cpu_seconds
        self._executor = ThreadPoolExecutor(1, "grammars")
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._accepted: OrderedDict[GrammarSource, str] = OrderedDict()
        self._accepted_bytes = 0

    async def check(self, source: GrammarSource, eos: Sequence[int]) -> Grammar:
        """Return the grammar for the wire. Raise ApiError. `eos`: tokens that end the answer."""
        name = source.param
        if not eos:
            raise invalid_request(name, f"{name}: this model has no token that ends an answer")
        try:
            return Grammar(_checked_size(_with_ids(await self.compile(source), source)), VERSION)
        except GrammarRefused as error:
            name = error.param or name
            raise invalid_request(name, f"{name}: {error}") from error
        except GrammarProcessError as error:
            detail = f"{error}; retry in 1 s"
            raise ApiError(Code.NO_CAPACITY, detail, param=name, retry_after=1.0) from error

    async def compile(self, source: GrammarSource) -> str:
        """Return llguidance's grammar, in which placeholders stand for markers. Raise GrammarRefused or
        GrammarProcessError."""
        if (known := self._accepted.get(source)) is not None:
            self._accepted.move_to_end(source)
            return known
        if self._waiting >= MAX_WAITING:
            raise GrammarProcessError(f"{MAX_WAITING} grammars wait to be checked already")
        request = {
            "kind": source.kind.value,
            "text": source.text,
            "whitespace": source.whitespace,
            "markers": [marker for marker, _ in source.tokens],
            "parts": [[part.kind.value, part.text] for part in source.parts],
        }
        self._waiting += 1
        try:
            loop = asyncio.get_running_loop()
            grammar = await loop.run_in_executor(self._executor, self._ask, request, source.parts)
        finally:
            self._waiting -= 1
        self._remember(source, grammar)
        return grammar

    def _remember(self, source: GrammarSource, grammar: str) -> None:
        if source not in self._accepted:
            self._accepted[source] = grammar
            self._accepted_bytes += _size(source, grammar)
        while self._accepted_bytes > REMEMBERED_BYTES:
            self._accepted_bytes -= _size(*self._accepted.popitem(last=False))

    def close(self) -> None:
        """End the child. A request that runs ends with it."""
        self._executor.submit(self._end_child)
        self._executor.shutdown(wait=False)

    def _ask(self, request: dict[str, Any], parts: Sequence[GrammarPart]) -> str:
        try:
            connection = self._connect()
            connection.sendall(pack_message(request))
            message = receive_message(connection)
        except (BrokenPipeError, ConnectionResetError):  # it ended before it had read all
            message = None
        except OSError as error:  # TimeoutError is one
            self._end_child()
            raise GrammarProcessError(f"the grammar process failed: {error}") from error
        if message is None:
            reason = self._budget_sentence(self._end_child())
            log.warning("the grammar process ended: the grammar %s", reason)
            raise GrammarRefused(f"it {reason}")
        answer, _ = message
        if "refused" in answer:
            place = answer.get("part")
            param = "" if place is None else parts[place].param
            raise GrammarRefused(answer["refused"], param)
        return str(answer["grammar"])

    def _connect(self) -> socket.socket:
        if self._process is not None and self._process.poll() is not None:
            self._end_child()
        if self._connection is None:
            own, other = socket.socketpair()
            with other:
                name, seconds = check_worker.__name__, str(self._cpu_seconds)
                self._process = subprocess.Popen(
                    [sys.executable, "-m", name, str(other.fileno()), seconds],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[other.fileno()],
                    env=child_environment(),
                    start_new_session=True,  # a terminal's Ctrl-C is for the gateway
                )
            own.settimeout(ANSWER_SECONDS)
            self._connection = own
            self._finalizer = weakref.finalize(self, _end, self._process, own)
        return self._connection

    def _end_child(self) -> int:
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if self._finalizer is not None:
            self._finalizer.detach()
        return 0 if process is None or connection is None else _end(process, connection)

    def _budget_sentence(self, code: int) -> str:
        """Return the reason for the end of the child with this exit code."""
        if code == -signal.SIGPROF:
            return f"takes more than {self._cpu_seconds:g} s to check; use fewer repetitions"
        return "is too complex to check; use fewer repetitions and alternatives"


def _size(source: GrammarSource, grammar: str) -> int:
    return len(source.text) + sum(len(part.text) for part in source.parts) + len(grammar)


def _with_ids(grammar: str, source: GrammarSource) -> str:
    """Return the grammar with the ids of tokens for placeholders. A client's grammar has names, which servers know."""
    if source.kind is GrammarKind.GRAMMAR:
        return grammar
    for name, (_, token) in zip(placeholders(len(source.tokens)), source.tokens, strict=True):
        grammar = grammar.replace(name, f"<[{token}]>")
    return grammar


def _checked_size(grammar: str) -> str:
    """Return the grammar. Raise GrammarRefused for one that would end the link that carries it."""
    size = len(grammar.encode())
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarRefused(f"its grammar has {size} bytes; allowed: {MAX_GRAMMAR_BYTES}")
    return grammar


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> int:
    """End the process if it has not ended; return its exit code, negative for a signal."""
    connection.close()
    try:
        return process.wait(timeout=ANSWER_SECONDS)  # it ends when its connection does
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
