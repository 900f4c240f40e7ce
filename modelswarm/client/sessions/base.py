"""A call of `Inference.Session`, and what all sessions of the client have in common.

A lost connection is repaired: the session is attached again, at whichever gateway answers, or opened again where it is
gone. `session.py` and `block_session.py` then repeat their step. Knows no tokens and no rows.
"""

from __future__ import annotations

import os
import queue
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self, TypeAlias

import grpc

from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.connection import Connection
from modelswarm.client.sessions.errors import (
    ConnectionLostError,
    NoCapacityError,
    SessionBusyError,
    SessionClosedError,
    SessionLostError,
    translate,
)
from modelswarm.errors import ModelSwarmError, UnavailableError, UserError
from modelswarm.protocol.wire import api_pb2

# Seconds from a lost connection until the session is given up.
RECONNECT_SECONDS = 90.0
# Seconds between two tries, unless the gateway names a longer time.
RETRY_SECONDS = 0.5
# Bytes of the rows in one message: with its other fields, less than gRPC's limit of 4 MiB.
MESSAGE_BYTES = 2 << 20
# Repairs of a step that bring nothing new.
MAX_TRIES = 5
# Tokens of a step that was left early that are read to keep its KV.
MAX_DRAINED_TOKENS = 64
# Entries of a log that servers read in the time of a token. Behind a long log, more tokens are read.
ENTRIES_PER_TOKEN = 16
# Longest ttl in seconds, as in the HTTP API.
MAX_TTL = 86_400
# Positions that a gateway gives a session at least.
LEAST_POSITIONS = 2

Requests: TypeAlias = "queue.SimpleQueue[api_pb2.SessionRequest | None]"


class SessionStream:
    """One call of `Inference.Session`. Its end frees the session."""

    def __init__(self, connection: Connection, opened: api_pb2.OpenSession) -> None:
        self.is_in_step = False  # it sends parts
        self.left = 0  # tokens that the step may still send
        self._requests: Requests = queue.SimpleQueue()
        self._target = connection.target
        self._answers: Any = connection.stream_session(iter(self._requests.get, None))
        # The call and its thread must end with the session, also if it is not closed.
        self.end = weakref.finalize(self, _end_call, self._answers, self._requests, os.getpid())
        state = self.ask(open=opened).state
        self.session_id, self.position = state.session_id, state.position

    def send(self, **request: Any) -> None:
        self._requests.put(api_pb2.SessionRequest(**request))

    def receive(self) -> api_pb2.SessionResponse:
        """Return the next answer. Raise the typed error that ended the call."""
        try:
            answer: api_pb2.SessionResponse = next(self._answers)
        except (grpc.RpcError, StopIteration) as error:
            self.is_in_step = False
            self.end()
            if isinstance(error, grpc.RpcError):
                raise translate(error, self._target) from error
            message = f"the gateway at {self._target} ended the call"
            raise ConnectionLostError(message, self._target, "gRPC") from error
        self.position = answer.position
        return answer

    def receive_part(self) -> api_pb2.GenerateResponse:
        part = self.receive().part
        self.is_in_step = not part.finish_reason
        self.left -= len(part.token_ids)
        return part

    def ask(self, **request: Any) -> api_pb2.SessionResponse:
        self.send(**request)
        return self.receive()


def _end_call(answers: Any, requests: Requests, pid: int) -> None:
    if os.getpid() == pid:  # the child of a fork has the call of its parent
        answers.cancel()
        requests.put(None)


class SessionBase:
    """A session of at most `max_length` positions, all of them reserved on the servers until it is closed."""

    def __init__(
        self,
        connection: Connection,
        model: str,
        max_length: int,
        *,
        ttl: int | None = None,
        blocks: tuple[int, int] | None = None,
        more_positions: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`more_positions`: positions that the session needs beside those of its caller."""
        if not is_integer(max_length) or max_length < 1:
            raise UserError("max_length", f"{max_length!r}; allowed: an integer of at least 1")
        if ttl is not None and (not is_integer(ttl) or not 1 <= ttl <= MAX_TTL):
            detail = f"allowed: an integer from 1 to {MAX_TTL}, in seconds"
            raise UserError("ttl", f"{ttl!r}; {detail}")
        self._connection, self._model, self._clock = connection, model, clock
        self._ttl, self._blocks = ttl, blocks
        self.max_length = max_length
        self._reserved = max(LEAST_POSITIONS, max_length + more_positions)
        self._lock = threading.Lock()
        self._is_closed = False
        self._stream = self._open()

    @property
    def session_id(self) -> str:
        return self._stream.session_id

    def state(self) -> api_pb2.SessionState:
        """Return the session's state at the gateway: route, epoch, reroutes and more."""
        with self._used():
            self._drain()
            state: api_pb2.SessionState = self._stream.ask(state=api_pb2.GetState()).state
            return state

    def close(self) -> None:
        """Free the session's room at once. A second call does nothing, nor does one in the child of a fork."""
        if self._is_closed or not self._connection.is_of_this_process:
            return
        with self._used():
            self._is_closed = True
            if self._stream.is_in_step or not self._stream.end.alive:
                self._stream.end()
                return
            try:
                self._stream.ask(close=api_pb2.CloseSessionRequest())
            except (UnavailableError, ConnectionLostError, SessionLostError):
                pass  # its room is freed without us: by the end of the call, or of its ttl
            finally:
                self._stream.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ---- inside

    @contextmanager
    def _used(self) -> Iterator[None]:
        """Hold the session for one thread's call. Raise UserError in the child of a fork."""
        self._connection.check_process()
        if not self._lock.acquire(blocking=False):
            raise SessionBusyError(
                "the session runs a step; one thread at a time may use it, or open another session"
            )
        try:
            if self._is_closed:
                raise SessionClosedError("the session was closed; open another one")
            yield
        finally:
            self._lock.release()

    def _drain(self) -> None:
        """Read the rest of a step that was left early; the next step discards it.

        A long rest would take as long as its answer. Then another session is opened, which reads the log again.
        """
        most = max(MAX_DRAINED_TOKENS, self._stream.position // ENTRIES_PER_TOKEN)
        if self._stream.is_in_step and self._stream.left > most:
            self._stream.end()
            self._stream = self._connect("", SessionLostError("its step was left early"))
        try:
            while self._stream.is_in_step:
                self._stream.receive_part()
        except (ConnectionLostError, SessionLostError) as error:
            self._recover(error)

    def _open(self, attach: str = "") -> SessionStream:
        opened = api_pb2.OpenSession(model=self._model, session_id=attach, attach=bool(attach))
        if not attach:
            opened.session_id = _new_name()
            opened.max_length = self._reserved
            if self._ttl is not None:
                opened.ttl = self._ttl
            if self._blocks is not None:
                first, last = self._blocks
                opened.blocks.CopyFrom(api_pb2.BlockRange(first=first, last=last))
        return SessionStream(self._connection, opened)

    def _open_fork(self, parent: str, length: int) -> SessionStream:
        """Open a session into which the servers copy the first `length` entries of the session `parent`."""
        name = _new_name()
        try:
            self._connection.fork_session(self._model, parent, name, length)
            return self._open(name)
        except NoCapacityError:
            raise
        except (UnavailableError, ConnectionLostError, SessionLostError) as error:
            return self._connect(name, error)

    def _recover(self, failure: ModelSwarmError) -> None:
        self._stream = self._connect(self.session_id, failure)

    def _connect(self, attach: str, failure: ModelSwarmError) -> SessionStream:
        """Attach a session, or open it again where it is gone. Raise the last failure at the deadline."""
        deadline, pause = self._clock() + RECONNECT_SECONDS, 0.0
        while self._clock() + pause < deadline:
            time.sleep(pause)
            pause = RETRY_SECONDS
            try:
                return self._open(attach)
            except SessionLostError as error:
                attach, failure, pause = "", error, 0.0  # its log is here: build it again
            except (UnavailableError, ConnectionLostError) as error:
                failure = error
                if isinstance(error, UnavailableError):
                    pause = max(pause, error.retry_after)
        raise failure


def _new_name() -> str:
    return f"sess_{secrets.token_hex(12)}"
