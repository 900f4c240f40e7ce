"""Rebalancing: detection of a server with too many sessions, and their migration (R13, migration)."""

from __future__ import annotations

import pytest
from support.core.gateway import Swarm
from support.core.server import expected

from modelswarm_gateway.core.interface.effects import MigrationEnded, Rerouted
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.migration.imbalance import (
    PAUSE_SECONDS,
    ImbalanceDetector,
    Load,
    Shift,
)

PROMPT = [(7 * at) % 97 for at in range(20)]
NEW = 70


def pair(a: int, b: int, others: float = 0.0) -> dict[object, list[Load]]:
    return {"span": [Load("a", a, a), Load("b", b, b + others)]}


def test_imbalance_must_last_before_a_shift() -> None:
    rebalance = ImbalanceDetector(10.0)
    assert rebalance.find_shift(pair(8, 0), 0.0) is None
    assert rebalance.find_shift(pair(8, 0), 9.9) is None
    assert rebalance.find_shift(pair(8, 0), 10.0) == Shift("a", "b")


@pytest.mark.parametrize(
    "groups",
    (
        pair(5, 2),  # too small a difference
        pair(20, 15),  # too small a ratio
        pair(8, 0, others=8),  # other gateways have sessions there
        {"span": [Load("a", 8, 8)]},  # no replica
        {"span": [Load("a", 0, 9), Load("b", 0, 0)]},  # all sessions belong to other gateways
    ),
)
def test_unclear_imbalance_causes_no_shift(groups: dict[object, list[Load]]) -> None:
    rebalance = ImbalanceDetector(10.0)
    assert [rebalance.find_shift(groups, float(now)) for now in range(0, 60, 10)] == [None] * 6


def test_shifts_pause_and_stop_at_a_difference_of_two() -> None:
    rebalance = ImbalanceDetector(10.0)
    rebalance.find_shift(pair(8, 0), 0.0)
    now, own = 10.0, [8, 0]
    while rebalance.find_shift(pair(*own), now) is not None:
        own = [own[0] - 1, own[1] + 1]
        rebalance.on_started(now)
        assert rebalance.find_shift(pair(*own), now + PAUSE_SECONDS / 2) is None
        now += PAUSE_SECONDS
    assert own == [5, 3]
    assert rebalance.find_shift(pair(6, 2), now) is None, "the wait starts again"


def test_interrupted_imbalance_restarts_the_wait() -> None:
    rebalance = ImbalanceDetector(10.0)
    rebalance.find_shift(pair(8, 0), 0.0)
    rebalance.find_shift(pair(4, 4), 5.0)
    assert rebalance.find_shift(pair(8, 0), 12.0) is None
    assert rebalance.find_shift(pair(8, 0), 22.0) == Shift("a", "b")
    assert rebalance.find_shift(pair(0, 8), 23.0) is None, "another server is overloaded now"


def test_disabled_rebalancing_never_shifts() -> None:
    rebalance = ImbalanceDetector(0.0)
    assert [rebalance.find_shift(pair(50, 0), 100.0 * at) for at in range(5)] == [None] * 5


def crowd(swarm: Swarm, count: int) -> list[str]:
    names = [f"c{number}" for number in range(count)]
    for name in names:
        swarm.gateway.begin(name, PROMPT, NEW, ahead=5)
    swarm.run()
    return names


def read(swarm: Swarm, names: list[str], first: int, last: int) -> None:
    for count in range(first, last):
        for name in names:
            swarm.core.on_read(name, len(PROMPT) + count - 5, swarm.now)
        swarm.run()
        swarm.wait(0.2)


def tails(swarm: Swarm) -> list[int]:
    views = {view.peer: view.own_sessions for view in swarm.core.server_views()}
    return [count for peer, count in views.items() if swarm.servers[peer].hello.first == 2]


@pytest.mark.parametrize("seconds", (3.0, 0.0))
def test_crowded_sessions_spread_to_new_server_if_enabled(seconds: float) -> None:
    swarm = Swarm(settings=GatewaySettings(rebalance_after_seconds=seconds))
    swarm.serve(0, 2)
    swarm.serve(2, 4)
    names = crowd(swarm, 6)
    swarm.serve(2, 4)
    read(swarm, names, 6, NEW + 1)
    moved = swarm.gateway.all(MigrationEnded)
    assert [(move.cause, move.outcome) for move in moved] == [("rebalance", "migrated")] * len(
        moved
    )
    assert not swarm.gateway.all(Rerouted)
    assert tails(swarm) == ([4, 2] if seconds else [6, 0])
    for name in names:
        assert swarm.gateway.tokens(name) == expected(PROMPT, NEW)
