"""Opaque rows of one client (R14): those it sends in place of tokens, and those it wants to have returned.

`client.py` uses it and checks what comes. A third of the sessions of a scenario with rows have a block range: rows in,
rows out. The others have tokens, of which some are replaced by rows. In a scenario with rows of blocks most logs begin
with chains: a row, and what each block adds to it. An entry of a log names its row or chain, in every world.
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

MOST_BLOCKS = 8  # of a model in a scenario with rows of blocks
RANGE_LENGTH = 96  # entries that a session with a block range reserves


def _draw_chain(number: int, n_blocks: int) -> tuple[int, ...]:
    """Return a row, and what each of so many blocks adds to it. Many chains begin with the same row."""
    added = (mix(number << 16 | n_blocks << 8 | block) for block in range(1, 1 + n_blocks))
    return mix(number % 4 if n_blocks else number), *added


def _name_chains(chains: Sequence[tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    """Return the chains by the log entries that stand for them."""
    entries = opaque_entries(struct.pack(f"<{len(chain)}Q", *chain) for chain in chains)
    return dict(zip(entries, chains, strict=True))


CHAINS_BY_DEPTH = [
    _name_chains([_draw_chain(number, n_blocks) for number in range(64)])
    for n_blocks in range(1 + MOST_BLOCKS)
]
ENTRIES = tuple(CHAINS_BY_DEPTH[0])  # of single rows
CHAINS = {entry: chain for named in CHAINS_BY_DEPTH for entry, chain in named.items()}
ROWS = {entry: struct.pack(f"<{len(chain)}Q", *chain) for entry, chain in CHAINS.items()}


def input_chain(entry: int) -> tuple[int, ...]:
    """Return the row that a log entry brings into the first block, and what each block adds to it, if they do."""
    return CHAINS[entry] if is_opaque(entry) else (embed(entry),)


def rows_from(tokens: Sequence[int], start: int) -> dict[int, bytes]:
    """Return the rows of the opaque entries from `start` on, by position."""
    return {at: ROWS[tokens[at]] for at in range(start, len(tokens)) if is_opaque(tokens[at])}


class ClientRows:
    """The draws of one client, and the first returned row that it lacks."""

    def __init__(self, tools: Tools, name: str) -> None:
        load, n_blocks = tools.scenario.load, tools.scenario.layout.n_blocks
        self.are_used = load.sends_rows
        self._has_block_rows = load.has_block_rows
        self._rng = random.Random(f"rows/{tools.scenario.seed}/{name}")
        self.blocks: BlockRange | None = None
        self._chains: tuple[int, ...] = ()  # entries that its logs begin with
        if load.has_block_rows:
            if self._rng.random() < 0.8:
                self._chains = tuple(CHAINS_BY_DEPTH[n_blocks])
        elif load.has_rows and self._rng.random() < 0.3:
            first = self._rng.randrange(n_blocks)
            self.blocks = BlockRange(first, self._rng.randint(first + 1, n_blocks))
        self.next = 0

    def add(self, request: TurnRequest, known: int) -> TurnRequest:
        """Replace some tokens of a drawn request from `known` on, and perhaps ask for rows."""
        if not self.are_used:
            return request
        rng, tokens = self._rng, list(request.tokens)
        if self._has_block_rows:
            self._add_chains(tokens, known)
        elif rng.random() < 0.5:
            for at in range(known, len(tokens)):
                if rng.random() < 0.5:
                    tokens[at] = rng.choice(ENTRIES)
        sampling, most = request.sampling, request.max_tokens
        if rng.random() < 0.6:
            start = rng.choice((0, rng.randrange(len(tokens)), len(tokens) - 1))
            sampling = replace(sampling, returned=ReturnedRows(start, hidden_states=True))
            most = 0 if rng.random() < 0.3 else most
        return replace(request, tokens=tuple(tokens), sampling=sampling, max_tokens=most)

    def _add_chains(self, tokens: list[int], known: int) -> None:
        """Let the log begin with chains, or have more of them if it has nothing else up to `known`."""
        rng = self._rng
        if self._chains and all(is_opaque(entry) for entry in tokens[:known]):
            for at in range(known, rng.randint(known, len(tokens))):
                tokens[at] = rng.choice(self._chains)

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
