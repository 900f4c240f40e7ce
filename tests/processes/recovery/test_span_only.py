"""Real processes: when a server dies, the others of its route run nothing again (R6)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.models.tiny_models import TOY_BLOCKS, TOY_LENGTH, VOCAB
from support.processes.kill_scenarios import PLACES, prompt_of, until_hit, went_on_once
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Ask
from support.processes.swarm import Running

from modelswarm.protocol.identity import name_of

CONTEXT, NEW, AT = 700, 300, 20
A_FEW = 20  # rows that were on their way when the loop began, and are sent or run once more


@pytest.mark.parametrize("place", PLACES)
def test_only_the_lost_blocks_are_computed_again(hash_spans: Running, place: str) -> None:
    for answer in until_hit(lambda: lose(hash_spans, PLACES[place])):
        check_contiguous(answer)
        check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)
    hash_spans.wait_empty()


def lose(swarm: Running, place: int) -> tuple[Answer, bool]:
    """An answer, and whether nobody but the killed server was left: then rows were counted."""
    swarm.wait_whole()
    swarm.wait_empty()
    faults, before = swarm.faults(), swarm.rows()
    stream = swarm.start(Ask(prompt_of(CONTEXT, 11, VOCAB), NEW))
    stream.wait_tokens(AT)
    route = [hop.peer for hop in swarm.only_session().route]
    swarm.kill(route[place])
    answer = stream.answer()
    after = swarm.rows()
    hit = went_on_once(swarm, faults)
    if hit:
        names = [name_of(peer) for peer in route]
        lost = names.pop(place)
        check_rows({name: after[name] - before[name] for name in after if name != lost}, names)
    return answer, hit


def check_rows(ran: dict[str, int], kept: Sequence[str]) -> None:
    """By server, but for the lost one."""
    for name in kept:
        assert CONTEXT + NEW - 1 <= ran.pop(name) <= CONTEXT + NEW + A_FEW
    assert max(ran.values()) >= CONTEXT + NEW - AT - A_FEW  # whoever stepped in
