"""SIGSTOP of real servers: the stream goes on exactly, and what thaws is capacity again and nothing else."""

from __future__ import annotations

import signal

import pytest
from swarm.kills import SAMPLED, prompt_of
from swarm.models import VOCAB
from swarm.oracles import check_contiguous, check_hash
from swarm.running import Ask, Running, wait_until
from swarm.toy import TOY_BLOCKS, TOY_LENGTH

from modelswarm.local.swarm_door import server_name

SIGHT = 60.0
HEAD, TAIL = 0, 3


@pytest.mark.parametrize("place", [HEAD, TAIL])
def test_a_server_freezes_while_tokens_come(hash_spans: Running, place: int) -> None:
    swarm = hash_spans
    swarm.wait_empty()
    swarm.wait_whole()
    before = swarm.faults()
    stream = swarm.start(Ask(prompt_of(200, 7, VOCAB), 500, SAMPLED))
    stream.wait_tokens(30)
    frozen = swarm.only_session().route[place].peer
    swarm.local.kill(server_name(frozen), signal.SIGSTOP)
    try:
        wait_until(lambda: health(swarm, frozen) == "suspected", SIGHT, "nobody suspects it")
        answer = stream.answer()
    finally:
        swarm.local.kill(server_name(frozen), signal.SIGCONT)
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)
    assert swarm.faults().resumed > before.resumed
    takes_part_again(swarm, frozen)
    swarm.wait_empty()


def health(swarm: Running, peer: str) -> str:
    [found] = [server.health for server in swarm.view.snapshot().servers if server.peer == peer]
    return found


def takes_part_again(swarm: Running, peer: str) -> None:
    """The very process that was frozen carries sessions, with others on the way at the same time."""
    wait_until(lambda: health(swarm, peer) == "linked", SIGHT, "it is not taken back")
    rows = swarm.rows(server_name(peer))

    def worked() -> bool:
        swarm.ask_all([Ask(prompt_of(5, seed, VOCAB), 5) for seed in range(4)])
        return swarm.rows(server_name(peer)) != rows

    wait_until(worked, SIGHT, "it gets no session")
