"""Rows that the tail returns, with both cores: each reaches the client once and in order, whatever is lost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.core.gateway import FOREVER, ROW_BYTES, Swarm, add_gateway, swarm_of
from support.core.server import Options, expected, expected_rows
from support.simulator.planted.rows import LogsUnwantedTokens
from support.simulator.planted.swap import swap_class

from modelswarm.protocol.messages import (
    Finish,
    Grammar,
    PromptLogprobs,
    ReturnedRows,
    Rows,
    Sampling,
    Token,
)
from modelswarm_gateway.core.interface.effects import (
    Emitted,
    MigrationEnded,
    Rerouted,
    RowsReturned,
)
from modelswarm_gateway.core.interface.errors import PromptTooLong

PROMPT = [(7 * at) % 97 for at in range(20)]
NEW = 30
SPANS = ((0, 2), (2, 3), (3, 4))
LAST = len(PROMPT) - 1
GRAMMAR = Grammar("words", "hash")  # forced tokens have steps of their own


def make_swarm(
    start: int, spans: Sequence[tuple[int, int]] = SPANS, grammar: Grammar | None = None
) -> Swarm:
    swarm = Swarm()
    swarm.gateway.sampling = wanted(start, grammar)
    for first, last in spans:
        swarm.serve(first, last)
    return swarm


def wanted(start: int, grammar: Grammar | None = None) -> Sampling:
    return Sampling(grammar=grammar, returned=ReturnedRows(start, hidden_states=True))


def check_answer(swarm: Swarm, start: int, grammar: Grammar | None = None) -> None:
    tokens = expected(PROMPT, NEW, sampling=Sampling(grammar=grammar))
    assert swarm.gateway.tokens("a") == tokens
    assert swarm.gateway.rows("a") == expected_rows([*PROMPT, *tokens[:-1]], start)


@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
@pytest.mark.parametrize("start", [0, 7, LAST])
def test_rows_of_prompt_and_answer_come_in_order(
    start: int, spans: Sequence[tuple[int, int]]
) -> None:
    swarm = make_swarm(start, spans)
    swarm.gateway.start("a", PROMPT, NEW)
    check_answer(swarm, start)
    next_row = start
    for effect in swarm.gateway.effects:
        if isinstance(effect, RowsReturned):
            next_row = effect.start + len(effect.payload) // ROW_BYTES
        elif isinstance(effect, Emitted):
            assert effect.position == next_row, "the row that leads to a token comes before it"
    assert not swarm.gateway.all(Rerouted)


@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
@pytest.mark.parametrize("start", [0, LAST])
def test_turn_without_tokens_returns_rows_of_its_input(
    start: int, spans: Sequence[tuple[int, int]]
) -> None:
    """It ends with the row of its last entry, and the next turn goes on from the same log."""
    swarm = make_swarm(start, spans)
    swarm.gateway.start("a", PROMPT, 0)
    assert swarm.gateway.rows("a") == expected_rows(PROMPT, start)
    [end] = swarm.gateway.all(Emitted)
    assert (end.position, end.token, end.finish) == (len(PROMPT), -1, Finish.LENGTH)
    assert swarm.gateway.view("a").length == len(PROMPT)
    swarm.gateway.sampling = wanted(len(PROMPT))
    swarm.gateway.effects.clear()
    more = [*PROMPT, 5, 6, 7]
    swarm.gateway.start("a", more, 0)
    assert swarm.gateway.rows("a") == expected_rows(more, len(PROMPT))
    swarm.gateway.sampling = Sampling()
    swarm.gateway.clear_and_start("a", [*more, 8], NEW)
    assert swarm.gateway.tokens("a") == expected([*more, 8], NEW)
    assert not swarm.gateway.rows("a")


@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
@pytest.mark.parametrize("limits", [{"max_length": len(PROMPT)}, {"total_pages": 6}])
def test_log_that_fills_the_context_has_all_its_rows(
    spans: Sequence[tuple[int, int]], limits: Options
) -> None:
    """Also if only the pages limit it: 5 of 6 are for new sessions, and have 4 positions each."""
    swarm = swarm_of(*spans, **limits)
    swarm.gateway.sampling = wanted(0)
    with pytest.raises(PromptTooLong):
        swarm.gateway.start("a", [*PROMPT, 5], 0)
    with pytest.raises(PromptTooLong):
        swarm.gateway.start("a", PROMPT, 1)
    swarm.gateway.start("a", PROMPT, 0)
    assert swarm.gateway.rows("a") == expected_rows(PROMPT, 0)
    victim = swarm.route("a")[-1]
    swarm.kill(victim.peer)
    swarm.serve(victim.hello.first, victim.hello.last, **limits)
    swarm.gateway.sampling = wanted(LAST)
    swarm.gateway.clear_and_start("a", PROMPT, 0)
    assert swarm.gateway.rows("a") == expected_rows(PROMPT, LAST)


@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
def test_turn_without_tokens_leaves_none_in_a_log(spans: Sequence[tuple[int, int]]) -> None:
    """A gateway that takes the session over finds the log that the client knows."""
    swarm = make_swarm(0, spans)
    swarm.gateway.begin("a", PROMPT, 0, above=0)
    swarm.run(until=lambda: bool(swarm.gateway.all(Emitted)))
    swarm.kill(swarm.gateway.peer)
    other = add_gateway(swarm, 2)
    swarm.wait(other.find("a").takeover_wait + 1)
    assert other.adopt(other.find("a")) == PROMPT


def test_token_of_an_older_server_is_discarded() -> None:
    swarm = make_swarm(0)
    for server in swarm.servers.values():
        swap_class(server.core, LogsUnwantedTokens)  # it does not know `Turn.only_rows`
    swarm.gateway.start("a", PROMPT, 0)
    assert swarm.gateway.rows("a") == expected_rows(PROMPT, 0)
    assert swarm.gateway.tokens("a") == [-1]
    swarm.gateway.sampling = Sampling()
    swarm.gateway.clear_and_start("a", [*PROMPT, 8], NEW)
    assert swarm.gateway.tokens("a") == expected([*PROMPT, 8], NEW)
    assert not swarm.gateway.all(Rerouted)


@pytest.mark.parametrize("spans", [((0, 4),), SPANS])
def test_rows_wait_for_their_reader(spans: Sequence[tuple[int, int]]) -> None:
    swarm = make_swarm(3, spans)
    swarm.gateway.start("a", PROMPT, NEW, ahead=4)
    assert [position for position, _ in swarm.gateway.rows("a")] == [3, 4, 5, 6]
    assert swarm.gateway.view("a").waits_for_reader
    swarm.wait(30.0)
    assert not swarm.gateway.all(Rerouted), "a reader that pauses is no fault"
    swarm.gateway.read("a", 9)
    assert swarm.gateway.rows("a")[-1][0] == 12
    for position in range(10, len(PROMPT) + NEW):
        swarm.gateway.read("a", position)
        assert swarm.gateway.rows("a")[-1][0] < position + 4
    check_answer(swarm, 3)


def test_rows_scores_and_tokens_share_the_bulk_lane() -> None:
    """Else a token may overtake what must come before it."""
    swarm = make_swarm(0)
    swarm.gateway.sampling = replace(wanted(0), prompt_logprobs=1)
    swarm.gateway.start("a", PROMPT, NEW)
    gateway = swarm.gateway.peer
    for kind in (Rows, PromptLogprobs, Token):
        lanes = {send.lane.value for send in swarm.sent(kind) if send.to.peer == gateway}
        assert lanes == {"bulk"}


@pytest.mark.parametrize("new", [0, NEW])
@pytest.mark.parametrize("place", range(3))
def test_kill_repeats_no_row_and_loses_none(place: int, new: int) -> None:
    swarm = make_swarm(2)
    swarm.gateway.start("a", PROMPT, new, ahead=3)
    swarm.gateway.read("a", 8)
    victim = swarm.servers[swarm.gateway.route("a")[place]]
    swarm.kill(victim.peer)
    swarm.serve(victim.hello.first, victim.hello.last)
    swarm.gateway.read("a", FOREVER)
    swarm.wait(1.0)
    if new:
        check_answer(swarm, 2)
    else:
        assert swarm.gateway.rows("a") == expected_rows(PROMPT, 2)
        assert swarm.gateway.view("a").length == len(PROMPT)


@pytest.mark.parametrize("grammar", [None, GRAMMAR])
@pytest.mark.parametrize("seed", range(20))
def test_kills_and_drains_leave_rows_as_they_are(seed: int, grammar: Grammar | None) -> None:
    rng = random.Random(seed)
    start = rng.choice((0, 7, LAST))
    swarm = make_swarm(start, (*SPANS, *SPANS), grammar)
    swarm.gateway.start("a", PROMPT, NEW, ahead=rng.choice((1, 5, 30)))
    for position in range(start + 1, len(PROMPT) + NEW):
        route = swarm.gateway.route("a")
        if route and rng.random() < 0.15:
            swarm.core.migrations.drain(rng.choice(route), "drain", swarm.now)
        if rng.random() < 0.15:
            victim = rng.choice(list(swarm.servers.values()))
            swarm.kill(victim.peer)
            swarm.serve(victim.hello.first, victim.hello.last)
        for peer in list(swarm.core._registry.drains.peers):
            if rng.random() < 0.2:
                swarm.core.migrations.undrain(peer, "drain", swarm.now)
        if swarm.gateway.all(Emitted)[-1:] and len(swarm.gateway.tokens("a")) == NEW:
            break
        swarm.gateway.read("a", position)
        swarm.wait(0.1)
    if len(swarm.gateway.tokens("a")) < NEW:
        swarm.gateway.read("a", FOREVER)
        swarm.wait(1.0)
    check_answer(swarm, start, grammar)
    swarm.core.close_session("a", swarm.now)
    swarm.wait(1.0)
    assert all(server.core.stats.sessions == 0 for server in swarm.servers.values())


def test_tail_of_a_quiescent_session_migrates() -> None:
    swarm = make_swarm(0)
    swarm.gateway.start("a", PROMPT, NEW, ahead=5)
    swarm.gateway.read("a", len(PROMPT) + 5)
    old = swarm.gateway.route("a")[-1]
    new = swarm.serve(3, 4)
    swarm.core.migrations.drain(old, "drain", swarm.now)
    for position in range(len(PROMPT) + 6, len(PROMPT) + NEW):
        swarm.gateway.read("a", position)
        swarm.wait(0.1)
    assert [effect.outcome for effect in swarm.gateway.all(MigrationEnded)] == ["migrated"]
    assert new.core.stats.rows or new.peer in swarm.gateway.route("a")
    check_answer(swarm, 0)


def test_rows_of_a_wrong_size_are_not_taken() -> None:
    """They are a gap: the tail computes them again."""
    swarm = make_swarm(0)
    swarm.gateway.begin("a", PROMPT, NEW, ahead=3)
    swarm.run(until=lambda: bool(swarm.gateway.rows("a")))
    tail = swarm.gateway.route("a")[-1]
    [sent] = [send.item for send in swarm.sent(Rows, tail) if isinstance(send.item, Rows)][:1]
    short = Rows(sent.handle, sent.epoch, 1, 1, b"1234")
    swarm.core.receive(tail, short, swarm.now)
    swarm.run()
    assert [effect.cause for effect in swarm.gateway.all(Rerouted)] == ["gap"]
    swarm.gateway.read("a", FOREVER)
    swarm.wait(1.0)
    check_answer(swarm, 0)
