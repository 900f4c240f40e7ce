"""Rebalancing: when a server has too many sessions, and that they go over as planned moves do (R13)."""

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


def test_nothing_moves_before_a_server_has_had_too_many_for_long() -> None:
    rebalance = ImbalanceDetector(10.0)
    assert rebalance.find_shift(pair(8, 0), 0.0) is None
    assert rebalance.find_shift(pair(8, 0), 9.9) is None
    assert rebalance.find_shift(pair(8, 0), 10.0) == Shift("a", "b")


@pytest.mark.parametrize(
    "groups",
    (
        pair(5, 2),  # not clearly more
        pair(20, 15),  # not so many times as many
        pair(8, 0, others=8),  # another gateway's sessions are there
        {"span": [Load("a", 8, 8)]},  # no equal
        {"span": [Load("a", 0, 9), Load("b", 0, 0)]},  # not ours to move
    ),
)
def test_what_is_no_clear_difference_is_left_alone(groups: dict[object, list[Load]]) -> None:
    rebalance = ImbalanceDetector(10.0)
    assert [rebalance.find_shift(groups, float(now)) for now in range(0, 60, 10)] == [None] * 6


def test_it_goes_on_until_another_move_would_only_turn_it_round_and_rests_between_two() -> None:
    rebalance = ImbalanceDetector(10.0)
    rebalance.find_shift(pair(8, 0), 0.0)
    now, own = 10.0, [8, 0]
    while rebalance.find_shift(pair(*own), now) is not None:
        own = [own[0] - 1, own[1] + 1]
        rebalance.on_started(now)
        assert rebalance.find_shift(pair(*own), now + PAUSE_SECONDS / 2) is None
        now += PAUSE_SECONDS
    assert own == [5, 3]
    assert rebalance.find_shift(pair(6, 2), now) is None, "from here on it counts anew"


def test_a_difference_that_went_away_meanwhile_counts_anew() -> None:
    rebalance = ImbalanceDetector(10.0)
    rebalance.find_shift(pair(8, 0), 0.0)
    rebalance.find_shift(pair(4, 4), 5.0)
    assert rebalance.find_shift(pair(8, 0), 12.0) is None
    assert rebalance.find_shift(pair(8, 0), 22.0) == Shift("a", "b")
    assert rebalance.find_shift(pair(0, 8), 23.0) is None, "it is another one now"


def test_switched_off_it_never_moves_anything() -> None:
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
def test_sessions_that_crowd_one_server_spread_to_a_new_one_and_no_reader_notices(
    seconds: float,
) -> None:
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
