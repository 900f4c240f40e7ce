"""Logits and hidden states of a prompt and its answer, read by a forward pass when the answer is there.

Used by a pipeline, whose answers come over HTTP: rows need the gateway's gRPC port. torch and gRPC are imported when
rows are wanted for the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from modelswarm.errors import UserError

if TYPE_CHECKING:
    from modelswarm.client.sessions.connection import Connection

KINDS = ("all", "generation")
"""Rows of all tokens, or those that lead to a token of the answer."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The kinds of rows that a config asks for; None: none."""

    logits: str | None = None
    hidden_states: str | None = None

    @property
    def is_empty(self) -> bool:
        return self.logits is None and self.hidden_states is None


class AnswerRows:
    """Reads rows of the models of one gateway. Threads may share it."""

    def __init__(self, url: str) -> None:
        """Send nothing yet. `url`: that of the gateway's HTTP port."""
        self._url, self._lock = url, threading.Lock()
        self._connection: Connection | None = None

    def connect(self, field: str) -> Connection:
        """Return the connection to the gateway's gRPC port.

        `field`: the option that asks for rows. Raise UserError if torch is missing or the gateway has no such port,
        UnreachableError if nothing answers there.
        """
        with self._lock:
            if self._connection is None:
                if find_spec("torch") is None:
                    detail = "torch is not installed; pip install 'modelswarm[client]'"
                    raise UserError(field, f"rows are tensors, and {detail}")
                from modelswarm.client.sessions.connection import connect_to

                made = connect_to(self._url, field, f"leave {field} out")
                made.list_models()  # or it fails behind the answers
                self._connection = made
            return self._connection

    def read(
        self, model: str, prompt: Sequence[int], answer: Sequence[int], wanted: WantedRows
    ) -> tuple[Any, Any]:
        """Return logits and hidden states as float32 tensors [rows, width]; None for those that are not wanted.

        The last token of the answer has no row: nothing follows it.
        """
        from modelswarm.client.hf.logits import last_rows
        from modelswarm.client.sessions.session import GatewaySession, StepOptions

        tokens = [*prompt, *answer[:-1]]
        starts = {"all": 0, "generation": len(prompt) - 1}
        kinds = (wanted.logits, wanted.hidden_states)
        counts = [0 if kind is None else len(tokens) - starts[kind] for kind in kinds]
        start = len(tokens) - max(counts)
        connection = self.connect("output_logits")
        with GatewaySession(connection, model, len(tokens)) as session:
            if start:
                session.run_step(tokens[:start], StepOptions(max_tokens=0))
            parts = session.read_rows(
                tokens[start:],
                logits=counts[0] > 0,
                hidden_states=counts[1] > 0,
                all_positions=True,
            )
        rows = [part.logits for part in parts], [part.hidden_states for part in parts]
        logits, states = (
            last_rows(each, count) if count else None
            for each, count in zip(rows, counts, strict=True)
        )
        return logits, states

    def close(self) -> None:
        with self._lock:
            if self._connection is not None:
                self._connection.close()
