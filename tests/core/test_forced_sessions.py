"""Groups of forced tokens with both cores: kills, drains, takeovers and slow readers leave the tokens as they are."""

from __future__ import annotations

import random

import pytest
from support.core.gateway import Swarm
from support.core.server import expected

from modelswarm.protocol.messages import Finish, Grammar, Sampling
from modelswarm_gateway.core.interface.effects import Emitted, MigrationEnded, Rerouted

PROMPT = [(7 * at) % 97 for at in range(20)]
NEW = 60
SAMPLING = Sampling(grammar=Grammar("words", "hash", 16))
TOKENS = expected(PROMPT, NEW, sampling=SAMPLING)
SPANS = ((0, 2), (2, 3), (3, 4))


def make_swarm(copies: int = 1) -> Swarm:
    swarm = Swarm()
    swarm.gateway.sampling = SAMPLING
    for _ in range(copies):
        for first, last in SPANS:
            swarm.serve(first, last)
    return swarm


def read_to(swarm: Swarm, count: int) -> None:
    """Read on, so that the answer may have `count` tokens, and the rest of a group."""
    swarm.gateway.read("a", len(PROMPT) + count - 5)
    swarm.wait(0.1)


def test_group_is_emitted_entry_by_entry() -> None:
    swarm = make_swarm()
    swarm.gateway.start("a", PROMPT, NEW)
    seen = swarm.gateway.all(Emitted)
    assert [each.token for each in seen] == TOKENS
    assert [each.position for each in seen] == list(range(len(PROMPT), len(PROMPT) + NEW))
    assert [each.finish for each in seen] == [Finish.NONE] * (NEW - 1) + [Finish.LENGTH]
    steps = max(server.core.heartbeat().steps for server in swarm.servers.values())
    assert 2 * steps < NEW


@pytest.mark.parametrize("place", range(3))
def test_hop_of_a_quiescent_session_migrates(place: int) -> None:
    """The copy is complete when it has the KV before the withheld group; its rows run at the new hop."""
    swarm = make_swarm()
    swarm.gateway.start("a", PROMPT, NEW, ahead=5)
    read_to(swarm, 10)
    old = swarm.gateway.route("a")[place]
    hello = swarm.servers[old].hello
    new = swarm.serve(hello.first, hello.last)
    swarm.core.migrations.drain(old, "drain", swarm.now)
    for count in range(10, NEW + 1):
        read_to(swarm, count)
    assert [effect.outcome for effect in swarm.gateway.all(MigrationEnded)] == ["migrated"]
    assert swarm.gateway.route("a")[place] == new.peer
    assert swarm.gateway.tokens("a") == TOKENS
    assert not swarm.gateway.all(Rerouted)


@pytest.mark.parametrize("seed", range(20))
def test_kills_and_drains_do_not_change_tokens(seed: int) -> None:
    rng = random.Random(seed)
    swarm = make_swarm(2)
    swarm.gateway.start("a", PROMPT, NEW, ahead=rng.choice((1, 5, 30)))
    for count in range(5, NEW + 1):
        swarm.disturb(rng, undrain=0.2)
        read_to(swarm, count)
    swarm.gateway.read("a")
    swarm.wait(1.0)
    assert swarm.gateway.tokens("a") == TOKENS
    swarm.core.close_session("a", swarm.now)
    swarm.wait(1.0)
    assert all(server.core.stats.sessions == 0 for server in swarm.servers.values())


@pytest.mark.parametrize("kept", range(1, 20))
def test_stop_string_inside_a_group_ends_the_turn(kept: int) -> None:
    """The next turn continues from the log that was kept, with a grammar of its own."""
    swarm = make_swarm()
    swarm.gateway.start("a", PROMPT, NEW, ahead=5)
    swarm.gateway.read("a", len(PROMPT) + kept)
    log = [*PROMPT, *TOKENS[:kept]]
    swarm.core.truncate_turn("a", len(log), swarm.now)
    swarm.run()
    swarm.gateway.clear_and_start("a", [*log, 3], NEW)
    assert swarm.gateway.tokens("a") == expected([*log, 3], NEW, sampling=SAMPLING)
