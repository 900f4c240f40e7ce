"""A server dies and nobody else has room for its sessions: they wait, and go on when it is back.

The hash model, two spans, two servers each, and each with room for one session of full length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.models.tiny_models import TOY_BLOCKS, TOY_LENGTH, VOCAB
from support.processes.kill_scenarios import SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Ask
from support.processes.swarm import Running, local_settings, running_swarm

from modelswarm_serving.core.kv.admission import RESERVATION_SECONDS

NEW = TOY_LENGTH - 30


@pytest.fixture(scope="module")
def swarm(toy_folder: Path) -> Iterator[Running]:
    settings = local_settings("tight", hash_model=True)
    with running_swarm(
        toy_folder, "tight", spans=2, replicas=2, sessions=1, settings=settings
    ) as running:
        yield running


def judge(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)


@pytest.mark.parametrize("place", [0, 1], ids=["head", "tail"])
def test_a_session_waits_for_the_room_that_died_and_the_other_one_goes_on(
    swarm: Running, place: int
) -> None:
    swarm.wait_whole()
    swarm.wait_empty()
    time.sleep(RESERVATION_SECONDS)  # room is kept so long for a repair that may have gone elsewhere
    before = swarm.faults()
    streams = [swarm.start(Ask(prompt_of(30, seed, VOCAB), NEW, SAMPLED)) for seed in (1, 2)]
    for stream in streams:
        stream.wait_tokens(50)
    one, other = (session.route[place].peer for session in swarm.sessions())
    assert one != other, "one server took both"
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        swarm.ask(Ask(prompt_of(30, 3, VOCAB), NEW))
    swarm.kill(one)
    swarm.wait_session(lambda session: session.state == "held")
    for stream in streams:
        judge(stream.answer())
    after = swarm.faults()
    if after.silences == before.silences:  # no server stood still besides
        assert after.resumed == before.resumed + 1
    assert after.resumed > before.resumed
    judge(swarm.ask(Ask(prompt_of(30, 3, VOCAB), NEW)))
    swarm.wait_empty()
