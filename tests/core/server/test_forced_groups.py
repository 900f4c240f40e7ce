"""Groups of forced tokens at the servers: one message, one step per hop, released whole (R7: credit, R17: sampling)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.core.scripted_gateway import Client, ServerNetwork, prompt, route

from modelswarm.protocol.messages import FaultKind, Finish, Grammar, Rows, Sampling, Token

PROMPT = prompt(12)
NEW = 60


def grammar(max_forced: int) -> Sampling:
    return Sampling(grammar=Grammar("words", "hash", max_forced))


def make_client(network: ServerNetwork, max_forced: int = 16, hops: int = 3) -> Client:
    return Client(
        network, route(network, hops, total_pages=400), PROMPT[:], sampling=grammar(max_forced)
    )


def expected(client: Client, new: int = NEW) -> list[int]:
    return client.expected(PROMPT, new)


def steps(network: ServerNetwork) -> int:
    return max(server.core.heartbeat().steps for server in network.servers.values())


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("max_forced", [0, 1, 3, 16])
def test_groups_of_any_size_make_the_same_log(hops: int, max_forced: int) -> None:
    network = ServerNetwork()
    client = make_client(network, max_forced, hops)
    client.start(NEW)
    client.finish()
    assert client.log == [*PROMPT, *expected(client)]
    assert max(len(token.forced) for token in client.tokens) <= max_forced
    assert not client.reports


def test_forced_tokens_take_no_steps_of_their_own() -> None:
    taken = []
    for max_forced in (0, 16):
        network = ServerNetwork()
        client = make_client(network, max_forced)
        client.start(NEW)
        groups = client.finish()
        taken.append(steps(network))
        assert taken[-1] <= len(groups) + 1, "the prompt has two, each other makes a group"
    assert 2 * taken[1] < taken[0]


def test_rows_of_a_group_travel_as_one() -> None:
    network = ServerNetwork()
    client = make_client(network)
    client.start(NEW)
    groups = client.finish()
    sent = {
        (rows.first, rows.count)
        for rows in network.sent_to(client.hops[-1][0].peer, Rows)
        if rows.first >= len(PROMPT)
    }
    wanted = {(token.position, len(token.group)) for token in groups[:-1]}
    assert wanted <= sent
    assert max(count for _, count in sent) > 2


@pytest.mark.parametrize("credit", range(len(PROMPT), len(PROMPT) + 20))
def test_group_beyond_credit_is_withheld_whole(credit: int) -> None:
    network = ServerNetwork()
    client = make_client(network)
    client.start(NEW, credit=credit)
    groups = client.finish()
    released, withheld = groups[:-1], groups[-1]
    assert all(token.group_end <= credit for token in released)
    assert withheld.group_end > credit
    tail = client.hops[-1][0].core._fencing.hops.get(client.own[-1])
    assert tail is not None and tail.kv == withheld.position, "no row of the group has run"
    client.raise_credit(1 << 30)
    client.finish()
    assert client.log == [*PROMPT, *expected(client)]


def test_tail_runs_the_prompt_and_waits_for_its_grammar() -> None:
    network = ServerNetwork()
    client = make_client(network)
    servers = [server for server, _, _ in client.hops]
    for server in servers:
        server.holds_grammars = True
    client.start(NEW)
    assert client.finish() == []
    hop = servers[-1].core._fencing.hops.get(client.own[-1])
    assert hop is not None and hop.kv == len(PROMPT) - 1
    assert [len(server.grammar_requests) for server in servers] == [0, 0, 1]
    servers[-1].compile_grammars(network.now)
    client.finish()
    assert client.log == [*PROMPT, *expected(client)]


def test_grammar_that_cannot_be_compiled_ends_the_session() -> None:
    network = ServerNetwork()
    client = make_client(network)
    tail = client.hops[-1][0]
    tail.holds_grammars = True
    client.start(NEW)
    client.finish()
    tail.compile_grammars(network.now, "no such rule")
    assert client.finish() == []
    assert [(each.kind, each.detail) for each in client.reports] == [
        (FaultKind.NO_TOKEN, "no such rule")
    ]


@pytest.mark.parametrize("new", range(1, 20))
def test_turn_ends_inside_a_group(new: int) -> None:
    network = ServerNetwork()
    client = make_client(network)
    client.start(new)
    groups = client.finish()
    assert client.log == [*PROMPT, *expected(client, new)]
    assert [token.finish for token in groups] == [Finish.NONE] * (len(groups) - 1) + [Finish.LENGTH]


@pytest.mark.parametrize("cut", range(len(PROMPT) + 1, len(PROMPT) + 20))
def test_recovery_at_any_entry_forces_the_same_tokens(cut: int) -> None:
    """The gateway's log may end anywhere, also inside of what was once a group."""
    network = ServerNetwork()
    client = make_client(network)
    client.start(NEW)
    client.finish()
    log = client.log[:]
    del client.log[cut:]
    client.refence()
    client.resume()
    assert client.log == log


def test_tokens_of_a_group_are_never_packed_apart() -> None:
    network = ServerNetwork()
    client = make_client(network)
    client.start(NEW)
    client.finish()
    ring = network.sent_to(client.hops[0][0].peer, Token)
    assert [token.group for token in ring] == [token.group for token in client.tokens]
    assert all(left.group_end == right.position for left, right in pairwise(ring))
