"""After a server's death the other servers of its route run no row again (R6, replay), with real processes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.kill_scenarios import PLACES, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Request
from support.processes.swarm import ENDLESS, Running

from modelswarm.protocol.identity import name_of

CONTEXT, NEW, AT = 700, 1000, 20  # tokens: of the prompt, of the answer, before the kill
A_FEW = 20  # rows in flight when the recovery began, which are sent or run once more


MARKS = dict.fromkeys(("head", "middle"), pytest.mark.full)


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=MARKS.get(place, ())) for place in PLACES]
)
def test_only_lost_blocks_are_computed_again(hash_spans: Running, place: str) -> None:
    swarm = hash_spans
    swarm.wait_whole()
    swarm.wait_empty()
    faults, before = swarm.faults(), swarm.rows()
    stream = swarm.start(Request(prompt_of(CONTEXT, 11, VOCAB), NEW))
    stream.wait_tokens(AT)
    route = [hop.peer for hop in swarm.only_session().route]
    swarm.kill(route[PLACES[place]])
    answer = stream.answer()
    after = swarm.rows()
    assert swarm.faults().resumed == faults.resumed + 1
    names = [name_of(peer) for peer in route]
    lost = names.pop(PLACES[place])
    before.pop(lost)  # its replacement counts from zero
    check_rows({name: after[name] - before.get(name, 0) for name in after}, names)
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=ENDLESS)
    swarm.wait_empty()


def check_rows(ran: dict[str, int], kept: Sequence[str]) -> None:
    """Check the rows that each server ran after the kill; `kept` are the remaining servers of the route.

    The session may return to the lost server's replacement, which is ready before the answer ends.
    """
    for name in kept:
        assert CONTEXT + NEW - 1 <= ran.pop(name) <= CONTEXT + NEW + A_FEW
    assert sum(ran.values()) >= CONTEXT + NEW - AT - A_FEW  # of the lost blocks
