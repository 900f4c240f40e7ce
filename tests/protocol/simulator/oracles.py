"""What must hold: the reference that says which token comes next, and the checks of a world at rest.

The reference is one hash model that holds every block, run without any protocol.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from modelswarm_serving.model.hash import HashModel
from protocol.simulator.processes import GatewayProcess, ServerProcess
from protocol.simulator.scenario import Scenario
from protocol.simulator.trace import Violation

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import ModelShape, Pick, Work


class Reference:
    """The unfailing swarm for one session: keeps KV, so each next token costs one row."""

    def __init__(self, scenario: Scenario) -> None:
        layout = scenario.layout
        self._blocks = (0, layout.n_blocks)
        self._model = HashModel(
            ModelShape(
                first=0,
                last=layout.n_blocks,
                n_blocks=layout.n_blocks,
                row_bytes=HashModel.ROW_BYTES,
                page_size=layout.max_length,
                total_pages=1,
                max_length=layout.max_length,
                vocab_size=scenario.vocab,
            )
        )
        self._run: list[int] = []  # tokens whose KV the model holds

    def next_token(self, log: Sequence[int], sampling: Sampling) -> int:
        """What entry len(log) must be."""
        common = 0
        for ours, theirs in zip(self._run, log, strict=False):
            if ours != theirs:
                break
            common += 1
        common = min(common, len(log) - 1)
        work = Work(
            pages=(0,),
            first=common,
            count=len(log) - common,
            blocks=self._blocks,
            tokens=log[common:],
            rows=None,
            emit=len(log),
            pick=Pick(sampling, len(log), log),
        )
        self._run = list(log)
        [result] = self._model.step([work])
        assert result.picked is not None, result.error
        return result.picked.token


def check_pages(server: ServerProcess) -> None:
    """No page belongs to two hops, and none is lost (I5)."""


def check_at_rest(gateway: GatewayProcess, servers: Iterable[ServerProcess]) -> None:
    """Every session is closed and time has passed: nothing is held anywhere (I5)."""
    if gateway.core.sessions():
        raise Violation(f"the gateway still has {gateway.core.sessions()}")
    for server in servers:
        if server.alive:
            stats = server.core.stats
            if stats.free_pages != stats.total_pages or stats.sessions:
                raise Violation(f"{server.name} leaks: {stats}")
