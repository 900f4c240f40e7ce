"""Both cores under seeded faults in virtual time: exact tokens, no stall, no leak."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.simulator.ring_coverage import has_ring
from support.simulator.scenarios.base import SCENARIOS, draw
from support.simulator.world import Outcome, World, simulate_once

SAMPLE = range(2)  # seeds of the fast tier
MORE = (range(2, 15), range(15, 30))
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "seeds", [SAMPLE, *(pytest.param(more, marks=pytest.mark.full) for more in MORE)], ids=str
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_sessions_get_the_reference_tokens_under_faults(name: str, seeds: range) -> None:
    for seed in seeds:
        simulate_once(seed, name)


def test_kills_are_injected_and_reroute_sessions() -> None:
    outcome = World(draw(1, "kills")).run()
    assert outcome.faults["kill"] > 0
    assert outcome.reroutes > 0
    assert outcome.tokens > 0


def test_sessions_of_killed_gateway_are_taken_over() -> None:
    assert sum(simulate_once(seed, "adoptions").taken_over for seed in range(4)) > 0


def test_sessions_of_stalled_gateway_are_taken_over() -> None:
    assert sum(simulate_once(seed, "asleep").taken_over for seed in range(2)) > 0


def test_clients_leave_turns_that_are_handed_over_or_refused() -> None:
    outcome = Outcome()
    for seed in range(4):
        outcome.add(simulate_once(seed, "handover"))
    assert outcome.taken_over > 0
    assert outcome.refused > 0
    assert outcome.faults["leave"] > 0
    assert outcome.faults["hand_over"] > 0


def test_sessions_are_rebalanced_to_servers_that_join_late() -> None:
    assert sum(simulate_once(seed, "rebalances").rebalanced for seed in range(2)) > 0


def test_sessions_are_forked_and_copy_their_parents() -> None:
    outcome = Outcome()
    for seed in range(4):
        outcome.add(simulate_once(seed, "families"))
    assert outcome.forked > 0
    assert outcome.reroutes > 0


def test_turns_are_resumed_after_broken_streams_and_takeovers() -> None:
    outcome = Outcome()
    for seed in range(8):
        outcome.add(simulate_once(seed, "rules"))
    assert outcome.resumed > 0
    assert outcome.taken_over > 0


def test_rows_are_returned_after_reroutes_and_takeovers() -> None:
    outcome = Outcome()
    for seed in range(12, 17):
        outcome.add(simulate_once(seed, "rows"))
    assert outcome.returned > 0
    assert outcome.reroutes > 0
    assert outcome.taken_over > 0


@pytest.mark.full
def test_rows_of_blocks_outlive_reroutes_takeovers_and_forks() -> None:
    outcome = Outcome()
    for seed in range(14, 17):
        outcome.add(simulate_once(seed, "block_rows"))
    assert outcome.reroutes > 0
    assert outcome.migrations["migrated"] > 0
    assert outcome.taken_over > 0
    assert outcome.forked > 0


def test_seed_replays_exactly_in_another_process() -> None:
    """Other string hashes change nothing, as no order depends on a set of names."""

    def run_trace(hash_seed: str) -> str:
        command = [sys.executable, "-m", "support.simulator", "--seed", "3", "--trace"]
        paths = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120, check=True
        )
        return done.stdout

    assert run_trace("1") == run_trace("2")


def test_ring_around_parted_pairs_is_found_if_there_is_one() -> None:
    servers = {"a": (0, 2), "b": (2, 4), "c": (2, 4)}
    assert has_ring(servers, 4, {frozenset("ab")})
    assert not has_ring(servers, 4, {frozenset("ab"), frozenset("ac")})
    assert has_ring(servers | {"d": (1, 4)}, 4, {frozenset("ab"), frozenset("ac")})
