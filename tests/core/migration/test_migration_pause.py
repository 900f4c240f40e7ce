"""The longest gap between tokens during a drain, compared with the usual gap, in virtual time.

`bench/recovery/drain_gap.py` measures the same with processes and a transformer. Rows take time here, so a copy
that takes steps from live rows would lengthen the gap.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field, replace

from support.simulator.actors.gateway_process import GatewayProcess
from support.simulator.scenario import Conditions, Faults, Load
from support.simulator.scenarios.base import draw
from support.simulator.world import World

from modelswarm_gateway.core.interface.effects import Effect, Emitted, MigrationEnded, Rerouted

STREAMS, PROMPT, NEW = 6, 80, 330
QUIET, EVERY = 1.0, 0.02  # seconds before the first drain; seconds between two looks at a drain
STEP, ROW = 0.004, 0.0003
MOST = 3.0


@dataclass
class Watched:
    """A world in which one server of each span is drained, and the times of its tokens."""

    world: World
    times: dict[str, list[float]] = field(default_factory=dict)
    seen: list[Effect] = field(default_factory=list)
    drained: list[tuple[float, float]] = field(default_factory=list)  # begin, end

    def watch(self) -> None:
        deliver = self.world._deliver

        def watched(gateway: GatewayProcess, effects: list[Effect]) -> None:
            for effect in effects:
                if isinstance(effect, Emitted):
                    self.times.setdefault(effect.session, []).append(self.world.clock.now)
                elif isinstance(effect, MigrationEnded | Rerouted):
                    self.seen.append(effect)
            deliver(gateway, effects)

        self.world._deliver = watched  # type: ignore[method-assign]
        self.world.clock.after(QUIET, self._drain, ["s0", "s2"])

    def _drain(self, names: list[str]) -> None:
        if names:
            peer = self.world.servers[names[0]].address.peer
            [gateway] = self.world.gateways.values()
            gateway.core.migrations.drain(peer, "drain", self.world.clock.now)
            gateway.pump()
            self._look(peer, names[1:], self.world.clock.now)

    def _look(self, peer: str, names: list[str], began: float) -> None:
        now = self.world.clock.now
        [gateway] = self.world.gateways.values()
        view = gateway.core.migrations.drain_progress(peer)
        assert view is not None
        if view.hops:
            self.world.clock.after(EVERY, self._look, peer, names, began)
            return
        gateway.core.migrations.undrain(peer, "drain", now)
        self.drained.append((began, now))
        self._drain(names)

    def gaps(self, since: float, until: float) -> list[float]:
        pairs = [pair for times in self.times.values() for pair in itertools.pairwise(times)]
        return [b - a for a, b in pairs if b >= since and a <= until]


def test_drain_gap_is_at_most_three_times_the_median() -> None:
    scenario = draw(1, "calm")
    layout = replace(
        scenario.layout,
        n_blocks=4,
        spans=((0, 2), (0, 2), (2, 4), (2, 4)),
        page_size=8,
        total_pages=1000,
        max_length=1000,
        token_budget=512,
        row_window=1024,
        replay_bytes=1 << 20,
    )
    load = Load(
        sessions=STREAMS,
        start_seconds=0.01,
        turns=1,
        prompt=(PROMPT, PROMPT),
        max_tokens=(NEW, NEW),
        no_limit_chance=0.0,
        stop_chance=0.0,
        close_chance=0.0,
        eos_chance=0.0,
        slow_reader_chance=0.0,
    )
    conditions = Conditions(latency=0.0003, step_seconds=STEP, row_seconds=ROW)
    world = World(
        replace(scenario, layout=layout, load=load, conditions=conditions, faults=Faults())
    )
    watched = Watched(world)
    watched.watch()
    world.run()
    moved = [effect.outcome for effect in watched.seen if isinstance(effect, MigrationEnded)]
    assert len(moved) == len(watched.seen), "a migration is no fault"
    assert set(moved) == {"migrated"} and len(moved) >= STREAMS // 2
    assert len(watched.drained) == 2
    usual = statistics.median(watched.gaps(QUIET / 2, QUIET))
    longest = max(max(watched.gaps(*span)) for span in watched.drained)
    assert longest / usual <= MOST, f"{1000 * longest:.1f} ms beside {1000 * usual:.1f} ms"
