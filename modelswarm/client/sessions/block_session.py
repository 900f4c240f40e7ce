"""A session of a range of blocks: rows of hidden states in, the rows behind its last block out.

The client keeps the rows that it sent. A session that is lost is built again from them, and the step is repeated. So
the caller sees each row once. Rows are bytes in the servers' dtype. Knows no tensors.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.base import MAX_TRIES, MESSAGE_BYTES, SessionBase
from modelswarm.client.sessions.connection import Connection, ServedModel
from modelswarm.client.sessions.errors import (
    ConnectionLostError,
    SessionLengthError,
    SessionLostError,
)
from modelswarm.errors import UserError
from modelswarm.protocol.wire import api_pb2


class BlockSession(SessionBase):
    """The KV of blocks [first, last) for at most `max_length` rows. Use it by `with`, or close it."""

    def __init__(
        self,
        connection: Connection,
        model: ServedModel,
        blocks: tuple[int, int],
        max_length: int,
        *,
        ttl: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the session. `ttl`: seconds that it is kept without a step.

        Raise NoCapacityError if the servers have no room, RefusedError for blocks that the model does not have,
        UnreachableError if no gateway answers.
        """
        super().__init__(connection, model.name, max_length, ttl=ttl, blocks=blocks, clock=clock)
        self._served = model
        self._rows = bytearray()  # that were sent, in order

    @property
    def position(self) -> int:
        """Number of rows that the session has. Assign a smaller one to rewind; what is behind it is discarded."""
        return len(self._rows) // self._served.row_bytes

    @position.setter
    def position(self, value: int) -> None:
        with self._used():
            if not is_integer(value) or not 0 <= value <= self.position:
                detail = f"allowed: 0 to {self.position}, the session's position"
                raise UserError("position", f"{value!r}; {detail}")
            del self._rows[value * self._served.row_bytes :]

    def run_rows(self, rows: bytes) -> bytes:
        """Append rows, and return as many: those behind the last block of the range.

        Raise SessionLengthError, SessionClosedError, SessionBusyError, RefusedError, SessionLostError.
        """
        with self._used():
            count, rest = divmod(len(rows), self._served.row_bytes)
            if rest:
                detail = f"rows of this model have {self._served.row_bytes} bytes"
                raise UserError("rows", f"{len(rows)} bytes; {detail}")
            if self.position + count > self.max_length:
                parts = f"{self.position} rows and {count} new ones"
                detail = f"{parts} are {self.position + count}, and max_length is {self.max_length}"
                raise SessionLengthError("max_length", f"maximum length exceeded: {detail}")
            self._drain()
            found = bytearray()
            size = self._message_rows * self._served.row_bytes
            for at in range(0, len(rows), size):
                found += self._run(rows[at : at + size])
            return bytes(found)

    @property
    def _message_rows(self) -> int:
        return max(1, MESSAGE_BYTES // self._served.row_bytes)

    def _run(self, rows: bytes) -> bytes:
        """Append the rows of one message. After a lost connection do it again."""
        tries = MAX_TRIES
        while True:
            try:
                found = self._attempt(rows)
            except (ConnectionLostError, SessionLostError) as error:
                tries -= 1
                if not tries:
                    raise
                self._recover(error)
                continue
            self._rows += rows
            return found

    def _attempt(self, rows: bytes) -> bytes:
        """Bring the session to the rows of this client, and send the new ones."""
        if not self._stream.end.alive:  # an error has ended it
            self._recover(SessionLostError("the session's call has ended"))
        start = self.position
        if self._stream.position > start:
            self._stream.ask(rewind=api_pb2.Rewind(position=start))
        while self._stream.position < start:  # it was built again
            end = min(start, self._stream.position + self._message_rows)
            row_bytes = self._served.row_bytes
            self._send(self._rows[self._stream.position * row_bytes : end * row_bytes])
        return self._send(rows, all_positions=True)

    def _send(self, rows: bytes | bytearray, *, all_positions: bool = False) -> bytes:
        """Run one step, and return the rows of its answer."""
        stream, served = self._stream, self._served
        shape = (len(rows) // served.row_bytes, served.hidden_size)
        given = api_pb2.Tensor(dtype=served.dtype, shape=shape, data=bytes(rows))
        step = api_pb2.SessionStep(
            hidden_states=given,
            max_tokens=0,
            return_hidden_states=True,
            all_positions=all_positions,
        )
        stream.send(step=step)
        stream.is_in_step = True
        found = bytearray()
        while stream.is_in_step:
            found += stream.receive_part().hidden_states.data
        return bytes(found)
