"""What must hold: the reference that says which token comes next, and the checks of a world at rest.

The reference is the hash model's arithmetic over a log, without any protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.actors.server_process import ServerProcess
from support.simulator.scenario import Scenario
from support.simulator.trace import Violation

from modelswarm.protocol.messages import Sampling, StartEpoch
from modelswarm_serving.core.hops.hop import TransferCursor
from modelswarm_serving.model.base import SampledToken
from modelswarm_serving.model.hash_model import MASK, embed, key_value, output, sample_token

AMPLE = 1 << 20  # bytes of kept rows, for all sessions of a simulated server


class Reference:
    """The unfailing swarm for one session: the hash model's arithmetic without pages, spans or steps."""

    def __init__(self, scenario: Scenario) -> None:
        self._n_blocks = scenario.layout.n_blocks
        self._vocab = scenario.vocab
        self._log: list[int] = []
        self._sums: list[tuple[int, ...]] = []  # per position: of each block's KV up to and with it
        self._row = 0  # what the last block gave for the last position

    def next_token(self, log: Sequence[int], sampling: Sampling) -> SampledToken:
        """What entry len(log) must be."""
        kept = 0
        for ours, theirs in zip(self._log, log, strict=False):
            if ours != theirs:
                break
            kept += 1
        kept = min(kept, len(log) - 1)
        del self._sums[kept:]
        for position in range(kept, len(log)):
            self._append(position, log[position])
        self._log = list(log)
        return sample_token(self._row, sampling, len(log), log, self._vocab)

    def _append(self, position: int, token: int) -> None:
        before = self._sums[-1] if self._sums else (0,) * self._n_blocks
        row, sums = embed(token), []
        for block, attention in enumerate(before):
            stored = key_value(block, position, row)
            row = output(stored, attention)
            sums.append((attention + stored) & MASK)
        self._sums.append(tuple(sums))
        self._row = row


def check_pages(server: ServerProcess) -> None:
    """No page belongs to two hops, and none is lost (I5)."""
    core = server.core
    held = [*core._steps._running, *(task[:2] for task in core._transfers._running)]
    # a freed hop may have several writes in the step that still holds it
    gone = {
        hop: None for hop, part in held if hop.is_freed and not isinstance(part, TransferCursor)
    }
    hops = [*core._fencing.hops, *gone]
    owned = [page for hop in hops for page in hop.pages]
    pool = core._fencing.admission.pages
    if len(set(owned)) != len(owned):
        raise Violation(f"{server.name}: a page belongs to two hops")
    if len(owned) + pool.free != pool.total:
        raise Violation(
            f"{server.name}: {len(owned)} pages owned, {pool.free} of {pool.total} free"
        )


def check_kept(server: ServerProcess) -> None:
    """The replay log of a hop is whole as long as nothing was evicted (R6): it ends where its KV ends."""
    core = server.core
    if server.evicted or core._replay_log.evictions or core._replay_log.limit < AMPLE:
        return
    for hop in core._fencing.hops:
        if hop.is_tail:
            continue
        run = core._replay_log._runs.get(hop.handle)
        kept = (0, 0) if run is None else (run.firsts[0], run.end)
        if kept != (0, hop.kv):
            raise Violation(f"{server.name} keeps rows {kept} of {hop.kv}", hop.session)


def check_go(server: ServerProcess, go: StartEpoch) -> None:
    """R6 wastes nothing: a hop that has all rows which its successor lacks goes on from its own KV."""
    core = server.core
    hop = core._fencing.hops.get(go.handle)
    if hop is None or hop.epoch != go.epoch or hop.fence_ack is None or go.standby:
        return
    spared = hop.is_tail or go.send_from >= hop.kv
    run = core._replay_log._runs.get(hop.handle)
    if run is not None and run.firsts[0] <= go.send_from and run.end >= hop.kv:
        spared = True
    if spared and go.start != hop.kv:
        raise Violation(
            f"{server.name} has {hop.kv} rows and all of them kept, but {go}", hop.session
        )


def check_at_rest(gateways: Iterable[GatewayProcess], servers: Iterable[ServerProcess]) -> None:
    """Every session is closed and time has passed: nothing is held anywhere (I5)."""
    for gateway in gateways:
        if gateway.core.session_views():
            raise Violation(f"{gateway.name} still has {gateway.core.session_views()}")
        recovery = gateway.core._recovery
        if recovery.hops_by_handle or recovery.hops.closing or gateway.core._registry.hops.total():
            raise Violation(f"{gateway.name} forgot to forget {recovery.hops_by_handle}")
    for server in servers:
        if not server.alive:
            continue
        if server.core._replay_log.bytes or server.core._replay_log._runs:
            raise Violation(f"{server.name} keeps {server.core._replay_log.bytes} bytes of rows")
        stats = server.core.stats
        if stats.free_pages != stats.total_pages or stats.sessions:
            raise Violation(f"{server.name} leaks: {stats}")
        pool = server.core._fencing.admission.pages
        free = pool.allocate(pool.free)
        pool.release(free)
        if len(set(free)) != stats.total_pages:
            raise Violation(f"{server.name}: a page is free twice")
