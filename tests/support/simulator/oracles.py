"""Oracles: the reference that computes the next token, and checks of pages, reservations, retained rows and leaks.

The reference is the hash model's arithmetic over a log, without any protocol. `actors/client.py` uses it; `world.py`
calls the checks. A new check raises `Violation`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence

from support.simulator.actors.client_rows import input_chain, rows_from
from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.server_process import ROW_BYTES, ServerProcess
from support.simulator.scenario import Scenario
from support.simulator.trace import Violation

from modelswarm.protocol.messages import BlockRange, PromptLogprob, Sampling, StartEpoch, Turn
from modelswarm_gateway.core.interface.effects import Effect, Emitted, Refused, RowsReturned
from modelswarm_gateway.core.interface.turn import RefusalReason
from modelswarm_serving.core.hops.hop import Hop, TransferCursor
from modelswarm_serving.core.kv.page_allocator import pages_needed
from modelswarm_serving.model.base import SampledToken
from modelswarm_serving.model.hash_model import (
    MASK,
    key_value,
    output,
    sample_token,
    score_token,
)

# A replay log of this many bytes holds all rows of a simulated server.
AMPLE_REPLAY_BYTES = 1 << 20


class Reference:
    """The expected tokens of one session: the hash model's arithmetic without pages, spans or steps."""

    def __init__(self, scenario: Scenario, blocks: BlockRange | None = None) -> None:
        whole = BlockRange(0, scenario.layout.n_blocks)
        self._blocks = blocks or whole
        self._vocab = scenario.vocab
        self._log: list[int] = []
        self._sums: list[
            tuple[int, ...]
        ] = []  # for each position, the sum of each block's KV up to it
        self._rows: list[int] = []  # output of the last block at each position

    def next_token(self, log: Sequence[int], sampling: Sampling, begin: int) -> SampledToken:
        """Return the expected entry at position len(log) of a turn that began at `begin`."""
        self._advance(log)
        return sample_token(self._rows[-1], sampling, len(log), log, begin, self._vocab)

    def scores(self, log: Sequence[int], start: int) -> tuple[PromptLogprob, ...]:
        """Return the expected log probabilities of the entries from `start` on, with one alternative."""
        self._advance(log)
        return tuple(
            score_token(self._rows[at - 1], log[at], 1, self._vocab)
            for at in range(start, len(log))
        )

    def rows(self, log: Sequence[int], start: int, end: int) -> bytes:
        """Return the expected rows [start, end) behind the last block."""
        self._advance(log)
        return struct.pack(f"<{end - start}Q", *self._rows[start:end])

    def _advance(self, log: Sequence[int]) -> None:
        common = 0
        for ours, theirs in zip(self._log, log, strict=False):
            if ours != theirs:
                break
            common += 1
        common = min(common, len(log) - 1)
        del self._sums[common:], self._rows[common:]
        for position in range(common, len(log)):
            self._append(position, log[position])
        self._log = list(log)

    def _append(self, position: int, token: int) -> None:
        first, last = self._blocks.first, self._blocks.last
        before = self._sums[-1] if self._sums else (0,) * (last - first)
        row, *added = input_chain(token)
        sums = []
        for block, attention in enumerate(before, first):
            if added:
                row = (row + added[block]) & MASK
            stored = key_value(block, position, row)
            row = output(stored, attention)
            sums.append((attention + stored) & MASK)
        self._sums.append(tuple(sums))
        self._rows.append(row)


class OwnLogs:
    """Checks each token and returned row against the log and the parameters of the gateway that emits it, read or not.

    A gateway whose client has left may still run its turn, and must not emit tokens of another gateway's turn.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._references: dict[tuple[str, str], Reference] = {}

    def check(self, gateway: GatewayProcess, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Emitted) and effect.token >= 0:
                self._check_token(gateway, effect)
            elif isinstance(effect, RowsReturned):
                self._check_rows(gateway, effect)

    def _check_rows(self, gateway: GatewayProcess, seen: RowsReturned) -> None:
        session = gateway.core._sessions.get(seen.session)
        end = seen.start + len(seen.payload) // ROW_BYTES
        if session is None or end > session.length:
            return
        reference = self._reference_of(gateway, seen.session, session.turn.blocks)
        expected = reference.rows(session.log, seen.start, end)
        if seen.payload != expected:
            text = f"{gateway.name} emits {seen}, but its own log makes {expected!r}"
            raise Violation(text, seen.session)

    def _reference_of(
        self, gateway: GatewayProcess, session: str, blocks: BlockRange | None
    ) -> Reference:
        key = gateway.address.peer, session
        return self._references.setdefault(key, Reference(self._scenario, blocks))

    def _check_token(self, gateway: GatewayProcess, seen: Emitted) -> None:
        session = gateway.core._sessions.get(seen.session)
        if session is None or seen.position >= session.length:
            return  # closed or truncated by an effect of the same batch
        turn = session.turn
        reference = self._reference_of(gateway, seen.session, turn.blocks)
        expected = reference.next_token(session.log[: seen.position], turn.sampling, turn.begin)
        if (seen.token, seen.logprob, seen.top) != (expected.token, expected.logprob, expected.top):
            text = f"{gateway.name} emits {seen}, but its own log makes {expected}"
            raise Violation(text, seen.session)


def check_pages(server: ServerProcess) -> None:
    """Check that no page belongs to two hops and none is lost (I5, no leak)."""
    core = server.core
    copies = [*core._transfers._running, *core._fencing.forks._running]
    in_step = [*core._steps._running, *(task[:2] for task in copies)]
    # A freed hop may have several writes in the step that still holds it.
    freed = {
        hop: None for hop, part in in_step if hop.is_freed and not isinstance(part, TransferCursor)
    }
    hops = [*core._fencing.hops, *freed]
    owned = [page for hop in hops for page in hop.pages]
    pool = core._fencing.admission.pages
    if len(set(owned)) != len(owned):
        raise Violation(f"{server.name}: a page belongs to two hops")
    if len(owned) + pool.free != pool.total:
        raise Violation(
            f"{server.name}: {len(owned)} pages owned, {pool.free} of {pool.total} free"
        )


def check_reservations(reserved: Mapping[str, int], servers: Iterable[ServerProcess]) -> None:
    """Check that each hop has the pages of its turn (I6, admission): of all positions that its session has reserved."""
    for server in servers:
        for hop in server.core._fencing.hops if server.alive else ():
            turn, whole = hop.turn, reserved.get(hop.session, 0)
            pages = pages_needed(turn.reserved_positions, server.shape.page_size)
            is_whole = turn.session_length == whole and turn.reserved_positions == whole
            if len(hop.pages) < pages or (whole and not is_whole):
                text = f"{server.name} has {len(hop.pages)} pages for {turn}, of {whole} positions"
                raise Violation(text, hop.session)


def check_refusal(
    gateway: GatewayProcess, refused: Refused, servers: Iterable[ServerProcess]
) -> None:
    """Check that a session whose servers live is not refused the room that it has reserved (I6, admission)."""
    core = gateway.core
    session = core._sessions.get(refused.session)
    if session is None or not session.turn.session_length:
        return
    if refused.reason is not RefusalReason.NO_ROOM:
        return
    kept = {hop.handle for each in servers if each.alive for hop in each.core._fencing.hops}
    hops = [hop for hop in session.hops if core._registry.is_connected(hop.peer)]
    route = [hop.blocks for hop in hops if hop.server_handle in kept]
    edges = [session.blocks[0], *(last for _, last in route)]
    if edges[-1] == session.blocks[1] and edges[:-1] == [first for first, _ in route]:
        raise Violation(f"{gateway.name} has the reserved hops {hops}, and {refused}", session.name)


def check_opaque(gateways: Iterable[GatewayProcess], servers: Iterable[ServerProcess]) -> None:
    """Check that each log, and each copy of one, has the rows of its opaque entries and no other ones (R14).

    A hop without a log has at most the rows that its own blocks add.
    """
    held = [
        (gateway.name, each.name, each.opaque, rows_from(each.log, 0))
        for gateway in gateways
        for each in gateway.core._sessions.values()
    ]
    for server in servers:
        for hop in server.core._fencing.hops:
            if hop.has_log:
                held.append((server.name, hop.session, hop.opaque, rows_from(hop.log, 0)))
            else:
                _check_block_rows(server, hop)
    for process, session, opaque, expected in held:
        if opaque != expected:
            raise Violation(f"{process} does not have the rows of its log of {session}", session)


def _check_block_rows(server: ServerProcess, hop: Hop) -> None:
    """Check that a hop between head and tail has rows of its blocks only, and of no entry without them."""
    size = ROW_BYTES * (hop.last - hop.first)
    for at, row in hop.opaque.items():
        if at >= hop.turn.prompt_rows or len(row) != size:
            text = f"{server.name} has {len(row)} bytes of rows for entry {at} of {hop.session}"
            raise Violation(text, hop.session)


def generates_nothing(turn: Turn, length: int) -> bool:
    """Say whether the turn begins behind `length` entries, and has room for the row of the last one only."""
    return (turn.begin, turn.end) == (length, length + 1)


def check_no_tokens(logs: Mapping[str, Sequence[int]], servers: Iterable[ServerProcess]) -> None:
    """Check that no server logs a token in a turn that generates none. `logs`: those of such turns, by session."""
    for server in servers:
        for hop in server.core._fencing.hops:
            length = len(logs.get(hop.session, ()))
            if generates_nothing(hop.turn, length) and len(hop.log) > length > 0:
                text = f"{server.name} has {len(hop.log)} entries of a log of {length}"
                raise Violation(f"{text}, and the turn generates none", hop.session)


def check_retained(server: ServerProcess) -> None:
    """Check that a replay log without evictions holds all rows up to the end of the hop's KV (R6, replay)."""
    core = server.core
    if server.evicted or core._replay_log.evictions or core._replay_log.limit < AMPLE_REPLAY_BYTES:
        return
    for hop in core._fencing.hops:
        if hop.is_tail:
            continue
        run = core._replay_log._runs.get(hop.handle)
        retained = (0, 0) if run is None else (run.firsts[0], run.end)
        if retained != (0, hop.kv):
            raise Violation(f"{server.name} retains rows {retained} of {hop.kv}", hop.session)


def check_start(server: ServerProcess, start: StartEpoch) -> None:
    """Check that a hop which retains all rows its successor lacks continues from its own KV (R6, replay)."""
    core = server.core
    hop = core._fencing.hops.get(start.handle)
    if hop is None or hop.epoch != start.epoch or hop.fence_ack is None or start.standby:
        return
    needs_no_replay = hop.is_tail or start.send_from >= hop.kv
    run = core._replay_log._runs.get(hop.handle)
    if run is not None and run.firsts[0] <= start.send_from and run.end >= hop.kv:
        needs_no_replay = True
    if needs_no_replay and start.start != hop.kv:
        raise Violation(
            f"{server.name} has {hop.kv} rows and retains all of them, but got {start}", hop.session
        )


def check_at_rest(gateways: Iterable[GatewayProcess], servers: Iterable[ServerProcess]) -> None:
    """Check that no process holds anything some time after all sessions were closed (I5, no leak)."""
    for gateway in gateways:
        if gateway.core.session_views():
            raise Violation(f"{gateway.name} still has {gateway.core.session_views()}")
        recovery = gateway.core._recovery
        if recovery.hops.by_handle or recovery.hops.closing or gateway.core._registry.hops.total():
            raise Violation(f"{gateway.name} still has hops {recovery.hops.by_handle}")
    for server in servers:
        if not server.alive:
            continue
        if server.core._replay_log.bytes or server.core._replay_log._runs:
            raise Violation(
                f"{server.name} still retains {server.core._replay_log.bytes} bytes of rows"
            )
        stats = server.core.stats
        if stats.free_pages != stats.total_pages or stats.sessions:
            raise Violation(f"{server.name} leaks: {stats}")
        pool = server.core._fencing.admission.pages
        free = pool.allocate(pool.free)
        pool.release(free)
        if len(set(free)) != stats.total_pages:
            raise Violation(f"{server.name}: a page is free twice")
