"""Migrations with the cores of both sides: the tokens equal those without a migration (R13, migration)."""

from __future__ import annotations

import random

import pytest
from support.core.gateway import Swarm
from support.core.server import Server, expected

from modelswarm_gateway.core.interface.effects import MigrationEnded, Rerouted

PROMPT = [(7 * at) % 97 for at in range(60)]
NEW = 40


def run_to(swarm: Swarm, session: str, count: int) -> None:
    """Let the client read until its answer may have `count` tokens."""
    swarm.gateway.read(session, len(PROMPT) + count - 5)
    swarm.wait(0.1)


def start_turn(swarm: Swarm, session: str) -> None:
    swarm.gateway.start(session, PROMPT, NEW, ahead=5)


def outcomes(swarm: Swarm) -> list[str]:
    return [effect.outcome for effect in swarm.gateway.all(MigrationEnded)]


def three_spans(swarm: Swarm, replay_bytes: int = 1 << 20) -> dict[str, Server]:
    spans = [(0, 2), (2, 3), (3, 4)]
    return {(s := swarm.serve(*span, replay_bytes=replay_bytes)).peer: s for span in spans}


@pytest.mark.parametrize("place", range(3))
def test_hop_migrates_in_the_middle_of_an_answer(place: int) -> None:
    swarm = Swarm()
    three_spans(swarm)
    start_turn(swarm, "a")
    run_to(swarm, "a", 10)
    old = swarm.gateway.route("a")[place]
    hello = swarm.servers[old].hello
    new = swarm.serve(hello.first, hello.last)
    swarm.core.migrations.drain(old, "drain", swarm.now)
    for count in range(10, NEW + 1):
        run_to(swarm, "a", count)
    assert outcomes(swarm) == ["migrated"]
    assert swarm.gateway.route("a")[place] == new.peer
    assert swarm.gateway.tokens("a") == expected(PROMPT, NEW)
    assert not swarm.gateway.all(Rerouted)
    assert swarm.servers[old].core.stats.sessions == 0
    rows = sum(server.core.stats.rows for server in swarm.servers.values())
    assert rows <= 4 * (len(PROMPT) + NEW) + 3 * 6, "no other row was run twice"


def test_only_hop_of_a_route_migrates() -> None:
    swarm = Swarm()
    old = swarm.serve(0, 4)
    start_turn(swarm, "a")
    run_to(swarm, "a", 10)
    new = swarm.serve(0, 4)
    swarm.core.migrations.drain(old.peer, "drain", swarm.now)
    for count in range(10, NEW + 1):
        run_to(swarm, "a", count)
    assert outcomes(swarm) == ["migrated"]
    assert swarm.gateway.route("a") == [new.peer]
    assert swarm.gateway.tokens("a") == expected(PROMPT, NEW)


def test_all_servers_are_drained_in_turn_under_many_sessions() -> None:
    swarm = Swarm()
    old = three_spans(swarm)
    names = [f"s{number}" for number in range(6)]
    for name in names:
        start_turn(swarm, name)
        run_to(swarm, name, 3)
    three_spans(swarm)
    done = 3
    for peer in old:
        swarm.core.migrations.drain(peer, "drain", swarm.now)
        while swarm.servers[peer].core.stats.sessions:
            done += 1
            for name in names:
                run_to(swarm, name, done)
            assert done < NEW, "the server was not drained in time"
    for name in names:
        run_to(swarm, name, NEW)
        assert swarm.gateway.tokens(name) == expected(PROMPT, NEW)
    assert outcomes(swarm) == ["migrated"] * 18


def test_ending_server_is_drained_before_it_exits() -> None:
    swarm = Swarm()
    three_spans(swarm)
    start_turn(swarm, "a")
    run_to(swarm, "a", 5)
    old = swarm.servers[swarm.gateway.route("a")[1]]
    swarm.serve(2, 3)
    old.core.start_draining(swarm.now)
    swarm.core.receive(old.peer, old.core.heartbeat(), swarm.now)
    for count in range(5, 20):
        run_to(swarm, "a", count)
    assert old.core.stats.sessions == 0
    swarm.kill(old.peer)
    for count in range(20, NEW + 1):
        run_to(swarm, "a", count)
    assert swarm.gateway.tokens("a") == expected(PROMPT, NEW)
    assert not swarm.gateway.all(Rerouted)


def test_session_without_retained_rows_migrates() -> None:
    swarm = Swarm()
    three_spans(swarm, replay_bytes=0)
    start_turn(swarm, "a")
    run_to(swarm, "a", 10)
    old = swarm.servers[swarm.gateway.route("a")[1]]
    swarm.serve(2, 3, replay_bytes=0)
    swarm.core.migrations.drain(old.peer, "drain", swarm.now)
    for count in range(10, NEW + 1):
        run_to(swarm, "a", count)
    assert outcomes(swarm) == ["migrated"]
    assert old.core.stats.sessions == 0
    assert swarm.gateway.tokens("a") == expected(PROMPT, NEW)


@pytest.mark.parametrize("seed", range(20))
def test_kills_during_migrations_do_not_change_tokens(seed: int) -> None:
    rng = random.Random(seed)
    swarm = Swarm()
    three_spans(swarm)
    three_spans(swarm)
    start_turn(swarm, "a")
    run_to(swarm, "a", 5)
    for count in range(5, NEW + 1):
        if rng.random() < 0.2:
            swarm.core.migrations.drain(rng.choice(swarm.gateway.route("a")), "drain", swarm.now)
        if rng.random() < 0.1:
            victim = rng.choice(list(swarm.servers.values()))
            swarm.kill(victim.peer)
            swarm.serve(victim.hello.first, victim.hello.last)
        for peer in list(swarm.core._registry.drains.peers):
            if rng.random() < 0.2:
                swarm.core.migrations.undrain(peer, "drain", swarm.now)
        run_to(swarm, "a", count)
    swarm.wait(1.0)
    assert swarm.gateway.tokens("a") == expected(PROMPT, NEW)
    swarm.core.close_session("a", swarm.now)
    swarm.wait(1.0)
    assert all(server.core.stats.sessions == 0 for server in swarm.servers.values())
