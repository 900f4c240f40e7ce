"""Opaque rows of one client (R14): those it sends in place of tokens, and those it wants to have returned.

`client.py` uses it and checks what comes. A third of the sessions of a scenario with rows have a block range: rows in,
rows out. The others have tokens, of which some are replaced by rows. An entry of a log names its row, in every world.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import replace

from support.simulator.actors.server_process import ROW_BYTES, Tools

from modelswarm.protocol.messages import BlockRange, ReturnedRows, Sampling
from modelswarm.protocol.opaque import is_opaque, opaque_entries
from modelswarm_gateway.core.interface.turn import Reservation, TurnRequest
from modelswarm_serving.model.hash_model import embed, mix

HASHES = [mix(number) for number in range(64)]
PACKED = [struct.pack("<Q", value) for value in HASHES]
ENTRIES = opaque_entries(PACKED)
ROWS = dict(zip(ENTRIES, PACKED, strict=True))
ROW_HASHES = dict(zip(ENTRIES, HASHES, strict=True))
RANGE_LENGTH = 96  # entries that a session with a block range reserves


def input_row(entry: int) -> int:
    """Return the row that a log entry brings into the first block."""
    return ROW_HASHES[entry] if is_opaque(entry) else embed(entry)


def rows_from(tokens: Sequence[int], start: int) -> dict[int, bytes]:
    """Return the rows of the opaque entries from `start` on, by position."""
    return {at: ROWS[tokens[at]] for at in range(start, len(tokens)) if is_opaque(tokens[at])}


class ClientRows:
    """The draws of one client, and the first returned row that it lacks."""

    def __init__(self, tools: Tools, name: str) -> None:
        self.are_used = tools.scenario.load.has_rows
        self._rng = random.Random(f"rows/{tools.scenario.seed}/{name}")
        self.blocks: BlockRange | None = None
        if self.are_used and self._rng.random() < 0.3:
            n_blocks = tools.scenario.layout.n_blocks
            first = self._rng.randrange(n_blocks)
            self.blocks = BlockRange(first, self._rng.randint(first + 1, n_blocks))
        self.next = 0

    def add(self, request: TurnRequest, known: int) -> TurnRequest:
        """Replace some tokens of a drawn request from `known` on, and perhaps ask for rows."""
        if not self.are_used:
            return request
        rng, tokens = self._rng, list(request.tokens)
        if rng.random() < 0.5:
            for at in range(known, len(tokens)):
                if rng.random() < 0.5:
                    tokens[at] = rng.choice(ENTRIES)
        sampling, most = request.sampling, request.max_tokens
        if rng.random() < 0.6:
            start = rng.choice((0, rng.randrange(len(tokens)), len(tokens) - 1))
            sampling = replace(sampling, returned=ReturnedRows(start, hidden_states=True))
            most = 0 if rng.random() < 0.3 else most
        return replace(request, tokens=tuple(tokens), sampling=sampling, max_tokens=most)

    def complete(self, request: TurnRequest) -> TurnRequest:
        """Return the request as its session may send it: only rows in a block range, and no score of a row."""
        if not self.are_used:
            return request
        if self.blocks is not None:
            request = self._in_range(request, self.blocks)
        sampling, last = request.sampling, len(request.tokens) - 1
        if any(is_opaque(entry) for entry in request.tokens):
            sampling = replace(sampling, prompt_logprobs=-1)
        if sampling.returned is not None:
            self.next = min(sampling.returned.start, last)
            returned = replace(sampling.returned, start=self.next)
            sampling = replace(sampling, returned=returned)
        return replace(request, sampling=sampling, row_bytes=ROW_BYTES)

    def _in_range(self, request: TurnRequest, blocks: BlockRange) -> TurnRequest:
        entries = tuple(
            entry if is_opaque(entry) else ENTRIES[entry % len(ENTRIES)]
            for entry in request.tokens[: RANGE_LENGTH - 1]
        )
        returned = request.sampling.returned or ReturnedRows(0, hidden_states=True)
        return replace(
            request,
            tokens=entries,
            max_tokens=0,
            sampling=Sampling(returned=returned),
            reservation=Reservation(RANGE_LENGTH, 60, blocks),
        )
