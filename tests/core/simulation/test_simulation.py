"""The real cores under seeded faults in virtual time: exact tokens, no stall, nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.simulator.ring_coverage import routable
from support.simulator.scenarios.base import SCENARIOS, draw
from support.simulator.world import World, simulate

SAMPLE = range(5)  # seeds of the fast tier
MORE = (range(5, 15), range(15, 30))
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "seeds", [SAMPLE, *(pytest.param(more, marks=pytest.mark.full) for more in MORE)], ids=str
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_session_gets_the_reference_tokens_whatever_fails(name: str, seeds: range) -> None:
    for seed in seeds:
        simulate(seed, name)


def test_faults_do_strike_and_sessions_do_reroute() -> None:
    outcome = World(draw(1, "kills")).run()
    assert outcome.faults["kill"] > 0
    assert outcome.reroutes > 0
    assert outcome.tokens > 0


def test_sessions_of_a_dead_gateway_are_adopted_by_another() -> None:
    assert sum(simulate(seed, "adoptions").adopted for seed in range(4)) > 0


def test_gateways_sleep_while_others_take_over_and_let_go_when_they_wake() -> None:
    assert sum(simulate(seed, "asleep").adopted for seed in range(8)) > 0


def test_sessions_are_spread_over_servers_that_came_late() -> None:
    assert sum(simulate(seed, "rebalances").balanced for seed in range(4)) > 0


def test_a_seed_replays_exactly_in_another_process() -> None:
    """Also with other string hashes: no set of names may decide the order of anything."""

    def story(hash_seed: str) -> str:
        command = [sys.executable, "-m", "support.simulator", "--seed", "3", "--trace"]
        paths = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    assert story("1") == story("2")


def test_a_way_around_parted_pairs_is_found_when_there_is_one() -> None:
    servers = {"a": (0, 2), "b": (2, 4), "c": (2, 4)}
    assert routable(servers, 4, {frozenset("ab")})
    assert not routable(servers, 4, {frozenset("ab"), frozenset("ac")})
    assert routable(servers | {"d": (1, 4)}, 4, {frozenset("ab"), frozenset("ac")})
