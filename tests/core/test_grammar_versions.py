"""A session with a grammar gets a tail whose library has the version that runs it."""

from __future__ import annotations

import pytest
from support.core.gateway import FOREVER, Swarm
from support.core.server import MODEL, Server, expected

from modelswarm.protocol.messages import Grammar, Sampling
from modelswarm_gateway.core.interface.effects import GrammarVersionChanged, MigrationEnded
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest

PROMPT = [5, 6, 7]
OLD, NEW = "llguidance 1.8.0", "llguidance 1.9.1"


def swarm_of_tails(*versions: str) -> tuple[Swarm, list[Server]]:
    """Return a swarm of a head, and a tail for each version."""
    swarm = Swarm()
    swarm.serve(0, 2)
    return swarm, [swarm.serve(2, 4, {"grammar": version}) for version in versions]


def start(swarm: Swarm, session: str, *, ahead: int = FOREVER, version: str = NEW) -> Server:
    """Start a turn with a grammar; return its tail."""
    if session not in swarm.gateway.opened:
        swarm.core.open_session(session, MODEL, swarm.now)
    sampling = Sampling(grammar=Grammar('{"grammars":[]}', version))
    request = TurnRequest(tuple(PROMPT), 20, sampling, credit_ahead=ahead)
    swarm.core.start_turn(session, request, swarm.now)
    swarm.run()
    return swarm.route(session)[-1]


def test_new_session_prefers_the_gateways_version() -> None:
    swarm, tails = swarm_of_tails(OLD, NEW, "", OLD)
    for n in range(6):
        assert start(swarm, f"a{n}") is tails[1]
    assert {tail.grammar for tail in swarm.core.hellos_of(MODEL) if tail.last == 4} == {
        OLD,
        NEW,
        "",
    }


def test_other_versions_share_sessions_if_none_is_the_same() -> None:
    swarm, tails = swarm_of_tails(OLD, OLD, "")
    taken = {start(swarm, f"a{n}").peer for n in range(12)}
    assert taken == {tail.peer for tail in tails[:2]}


@pytest.mark.parametrize("left", [OLD, NEW])
def test_recovery_prefers_the_version_that_has_run(left: str) -> None:
    """Only the tail that ran the session decides, not the gateway's own version."""
    swarm, _ = swarm_of_tails(OLD)
    first = start(swarm, "a", ahead=4)
    others = [swarm.serve(2, 4, {"grammar": version}) for version in (NEW, NEW, left)]
    swarm.kill(first.peer)
    assert (swarm.route("a")[-1] is others[2]) or left == NEW
    swarm.gateway.read("a")
    sampling = Sampling(grammar=Grammar('{"grammars":[]}', OLD))
    assert swarm.gateway.tokens("a") == expected(PROMPT, 20, sampling=sampling)
    changes = swarm.gateway.all(GrammarVersionChanged)
    assert [(each.before, each.now) for each in changes] == ([(OLD, NEW)] if left == NEW else [])


def test_sessions_without_a_grammar_use_all_tails() -> None:
    swarm, tails = swarm_of_tails(NEW, "", OLD)
    taken = set()
    for n in range(18):
        swarm.gateway.start(f"a{n}", PROMPT, 3)
        taken.add(swarm.route(f"a{n}")[-1].peer)
    assert taken == {tail.peer for tail in tails}


def test_turn_with_a_grammar_leaves_a_tail_without_grammars() -> None:
    swarm, _ = swarm_of_tails("")
    swarm.gateway.start("a", PROMPT, 3)
    able = swarm.serve(2, 4, {"grammar": NEW})
    assert start(swarm, "a") is able
    assert len(swarm.gateway.tokens("a")) == 3 + 20


@pytest.mark.parametrize("version", [OLD, ""])
def test_rebalancing_keeps_the_version_of_a_grammar(version: str) -> None:
    """Sessions with grammars crowd on the tails that have them; another one would end them."""
    swarm = Swarm(settings=GatewaySettings(rebalance_after_seconds=3.0))
    swarm.serve(0, 2)
    able = swarm.serve(2, 4, {"grammar": NEW})
    names = [f"a{number}" for number in range(6)]
    assert {start(swarm, name, ahead=4) for name in names} == {able}
    swarm.serve(2, 4, {"grammar": version})
    swarm.wait(12.0)
    assert {swarm.route(name)[-1] for name in names} == {able}
    assert not swarm.gateway.all(MigrationEnded)


@pytest.mark.parametrize("ends", [False, True])
def test_grammar_is_held_until_a_tail_has_grammars(ends: bool) -> None:
    """The only other tail would end the session."""
    swarm, [able] = swarm_of_tails(NEW)
    start(swarm, "a", ahead=4)
    swarm.serve(2, 4)
    if ends:
        swarm.kill(able.peer)
    else:
        swarm.core.migrations.drain(able.peer, "test", swarm.now)
    swarm.wait(2.0)
    assert swarm.gateway.view("a").state == ("held" if ends else "running")
    later = swarm.serve(2, 4, {"grammar": NEW})
    swarm.wait(2.0)
    swarm.gateway.read("a")
    swarm.wait(2.0)
    assert swarm.route("a")[-1] is later
    assert len(swarm.gateway.tokens("a")) == 20


def test_session_that_must_stay_keeps_no_other_from_leaving() -> None:
    swarm, [able] = swarm_of_tails(NEW)
    start(swarm, "a", ahead=4)
    swarm.gateway.start("b", PROMPT, 20, ahead=4)
    other = swarm.serve(2, 4)
    swarm.core.migrations.drain(able.peer, "test", swarm.now)
    swarm.wait(2.0)
    for count in range(20):
        swarm.gateway.read("b", len(PROMPT) + count)
        swarm.wait(0.2)
    assert [swarm.route(name)[-1] for name in ("a", "b")] == [able, other]
    assert swarm.gateway.tokens("b") == expected(PROMPT, 20)
