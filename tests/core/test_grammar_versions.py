"""A session with a grammar gets a tail whose library has the version that runs it."""

from __future__ import annotations

import pytest
from support.core.gateway import FOREVER, Swarm
from support.core.server import MODEL, Server, expected

from modelswarm.protocol.messages import Grammar, Sampling
from modelswarm_gateway.core.interface.effects import GrammarVersionChanged
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
