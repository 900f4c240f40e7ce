"""Real processes: when a server dies, the others of its route run nothing again (R6)."""

from __future__ import annotations

import pytest
from swarm.kills import PLACES, prompt_of
from swarm.models import VOCAB
from swarm.oracles import check_contiguous, check_hash
from swarm.running import Ask, Running
from swarm.toy import TOY_BLOCKS, TOY_LENGTH

from modelswarm.protocol.identity import name_of

CONTEXT, NEW, AT = 900, 80, 20
A_FEW = 20  # rows that were on their way when the loop began, and are sent or run once more


@pytest.mark.parametrize("place", PLACES)
def test_only_the_lost_blocks_are_computed_again(hash_spans: Running, place: str) -> None:
    hash_spans.wait_whole()
    hash_spans.wait_empty()
    before = hash_spans.rows()
    stream = hash_spans.start(Ask(prompt_of(CONTEXT, 11, VOCAB), NEW))
    stream.wait_tokens(AT)
    names = [name_of(hop.peer) for hop in hash_spans.only_session().route]
    lost = names[PLACES[place]]
    hash_spans.kill(hash_spans.only_session().route[PLACES[place]].peer)
    answer = stream.answer()
    after = hash_spans.rows()
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)
    ran = {name: after[name] - before[name] for name in after if name != lost}
    for name in set(names) - {lost}:
        assert CONTEXT + NEW - 1 <= ran.pop(name) <= CONTEXT + NEW + A_FEW
    assert max(ran.values()) >= CONTEXT + NEW - AT - A_FEW  # whoever stepped in
    hash_spans.wait_empty()
