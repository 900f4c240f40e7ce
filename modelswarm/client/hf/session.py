"""`model.inference_session()`: one context per row of a batch, which several calls of `generate` continue.

Decides what of an input is new. Knows no processors and no streamers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from copy import copy
from typing import Any, Literal, Self, TypeAlias, get_args

from modelswarm.client.hf.errors import ArgumentError
from modelswarm.client.integers import is_integer
from modelswarm.client.sessions.errors import (
    NoCapacityError,
    SessionBusyError,
    SessionClosedError,
)
from modelswarm.client.sessions.session import GatewaySession, StepOptions
from modelswarm.protocol.input_log import common_prefix_length

InputRule: TypeAlias = Literal["auto", "append", "transcript"]


class ModelSession:
    """A context on the servers that `generate(..., session=session)` continues.

    All `max_length` positions are reserved when it is opened, for prompts and answers together. They are freed when the
    `with` block ends. Each row of a batch has a context. `batch_size` of them are opened at once. If the first input
    has more rows, theirs are opened before its first token.

    `inputs` says what the input of `generate` is:

    - "append": only what is new, as in Petals.
    - "transcript": the whole conversation. What it has in common with the log is not computed again.
    - "auto": a transcript, if it repeats the log at least up to the end of the last turn's prompt. Anything else is
      only what is new.
    """

    def __init__(
        self,
        open_row: Callable[[], GatewaySession],
        max_length: int,
        inputs: InputRule,
        use: Callable[[ModelSession], AbstractContextManager[Any]],
        batch_size: int = 1,
    ) -> None:
        if inputs not in get_args(InputRule):
            allowed = ", ".join(map(repr, get_args(InputRule)))
            raise ArgumentError("inputs", f"{inputs!r}; allowed: {allowed}")
        self._open_row, self._inputs, self._use = open_row, inputs, use
        self.max_length = max_length
        self._is_closed = False
        if not is_integer(batch_size) or batch_size < 1:
            raise ArgumentError("batch_size", f"{batch_size!r}; allowed: an integer of at least 1")
        self._rows: list[GatewaySession] = []
        self._prompt_ends: list[int] = []  # per row: position behind the last turn's prompt
        self._open_rows(batch_size)
        self._turn = threading.Lock()
        self._exit = ExitStack()

    def __enter__(self) -> Self:
        self._exit.enter_context(self._use(self))
        return self

    def __exit__(self, *exception: object) -> None:
        with closing(self):
            self._exit.close()

    @property
    def position(self) -> int:
        """Tokens of the context; of the longest one in a batch. Assign a smaller number to go back."""
        return max(row.position for row in self._rows)

    @position.setter
    def position(self, value: int) -> None:
        if not is_integer(value) or not 0 <= value <= self.position:
            detail = f"allowed: 0 to {self.position}, the session's position"
            raise ArgumentError("position", f"{value!r}; {detail}")
        with self.turn():
            for place, row in enumerate(self._rows):
                row.rewind(min(value, row.position))
                self._prompt_ends[place] = min(value, self._prompt_ends[place])

    @property
    def tokens(self) -> list[list[int]]:
        """The token ids of each row's context."""
        return [list(row.tokens) for row in self._rows]

    @property
    def rows(self) -> Sequence[GatewaySession]:
        """The sessions of the gateway, one per row of the batch."""
        return tuple(self._rows)

    def fork(self) -> ModelSession:
        """Open another session with this one's context, whose KV the servers copy; use it by `with`, too.

        The fork has the same batch of rows, each at the position of its own, and the same max_length, ttl and `inputs`.
        Both go on independently, and closing one leaves the other.

        Raise NoCapacityError if the servers have no room for all rows: this session stays as it is. Raise
        SessionClosedError if it was closed, SessionBusyError while it runs a `generate`.
        """
        with self.turn():
            made = copy(self)
            made._rows, made._prompt_ends = [], list(self._prompt_ends)
            made._turn, made._exit = threading.Lock(), ExitStack()
            try:
                for row in self._rows:
                    made._rows.append(row.fork())
            except NoCapacityError as error:
                made.close()
                raise error.of_rows(len(made._rows), len(self._rows)) from error
            except BaseException:
                made.close()
                raise
            return made

    def close(self) -> None:
        """Free the room of all rows. A second call does nothing."""
        self._is_closed = True
        for row in self._rows:
            row.close()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the session for one call. Raise SessionBusyError or SessionClosedError.

        A call that fails, or is interrupted, leaves no token in the rows, so that it can be repeated.
        """
        if not self._turn.acquire(blocking=False):
            raise SessionBusyError(
                "the session runs a call; one thread at a time may use it, or open another session"
            )
        try:
            if self._is_closed:
                raise SessionClosedError("the session was closed; open another one")
            before, ends = self.tokens, list(self._prompt_ends)
            try:
                yield
            except BaseException:
                self._go_back(before, ends)
                raise
        finally:
            self._turn.release()

    def contexts(self, inputs: list[list[int]] | None) -> list[list[int]]:
        """Return each row's whole context for a turn with these inputs; None: go on behind the log."""
        if inputs is None:
            return self.tokens
        if self.position and len(inputs) != len(self._rows):
            detail = f"the session has {len(self._rows)}; open another one for another batch"
            raise ArgumentError("input_ids", f"{len(inputs)} rows; {detail}")
        if len(inputs) < len(self._rows):
            detail = f"the session was opened for {len(self._rows)}"
            raise ArgumentError("input_ids", f"{len(inputs)} rows; {detail}")
        self._open_rows(len(inputs))
        return [
            list(given)
            if self._is_transcript(place, given)
            else [*self._rows[place].tokens, *given]
            for place, given in enumerate(inputs)
        ]

    def begin_turn(self, place: int, context: list[int], *, has_input: bool) -> list[int]:
        """Go back to what the context and the log of a row have in common, and return what is new."""
        row = self._rows[place]
        common = common_prefix_length(row.tokens, context)
        if common < row.position:
            row.rewind(common)
        if has_input:
            self._prompt_ends[place] = len(context)
        return context[common:]

    def finish_turn(self, place: int, prompt: int, final: list[int], *, has_input: bool) -> None:
        """Bring a row to `final`, a turn whose tokens were chosen by the client behind `prompt` positions."""
        new = self.begin_turn(place, final, has_input=False)
        self._prompt_ends[place] = prompt if has_input else self._prompt_ends[place]
        self._rows[place].run_step(new, StepOptions(max_tokens=0))

    def _go_back(self, before: list[list[int]], ends: list[int]) -> None:
        """Take from each row what it has not had before; rows that were opened since are emptied."""
        if self._is_closed:
            return
        new = len(self._rows) - len(before)
        for row, log in zip(self._rows, [*before, *([] for _ in range(new))], strict=True):
            row.rewind(common_prefix_length(row.tokens, log))
        self._prompt_ends = [*ends, *(0 for _ in range(new))]

    def _open_rows(self, count: int) -> None:
        """Open rows until there are `count`. If one has no room, the rows that were there before stay."""
        before = len(self._rows)
        try:
            while len(self._rows) < count:
                self._rows.append(self._open_row())
                self._prompt_ends.append(0)
        except BaseException as error:
            opened = len(self._rows)
            for row in self._rows[before:]:
                row.close()
            del self._rows[before:], self._prompt_ends[before:]
            if isinstance(error, NoCapacityError):
                raise error.of_rows(opened, count) from error
            raise

    def _is_transcript(self, place: int, given: list[int]) -> bool:
        if self._inputs != "auto":
            return self._inputs == "transcript"
        return common_prefix_length(self._rows[place].tokens, given) >= self._prompt_ends[place]
