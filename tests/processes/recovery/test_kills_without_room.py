"""A server dies and no other has pages for its sessions: they are held, and continue after its restart.

The hash model, two spans, two servers each, and each with pages for one session of full length.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.eventually import eventually
from support.models.tiny_models import TOY_BLOCKS, VOCAB
from support.processes.kill_scenarios import SAMPLED, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Answer, Request
from support.processes.swarm import ENDLESS, Running, local_settings, running_swarm

from modelswarm_serving.core.kv.admission import RESERVATION_SECONDS

pytestmark = pytest.mark.full

NEW = ENDLESS - 30
READ_ON = 50  # tokens after the recovery


@pytest.fixture(scope="module")
def swarm(endless_folder: Path) -> Iterator[Running]:
    settings = local_settings("tight", hash_model=True)
    with running_swarm(
        endless_folder, "tight", spans=2, replicas=2, sessions=1, length=ENDLESS, settings=settings
    ) as running:
        yield running


def check_answer(answer: Answer) -> None:
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=ENDLESS)


@pytest.mark.parametrize("place", [0, 1], ids=["head", "tail"])
def test_session_without_room_waits_while_the_other_goes_on(swarm: Running, place: int) -> None:
    swarm.wait_whole()
    swarm.wait_empty()
    time.sleep(RESERVATION_SECONDS)  # a recovery's pages stay reserved that long
    before = swarm.faults()
    streams = [swarm.start(Request(prompt_of(30, seed, VOCAB), NEW, SAMPLED)) for seed in (1, 2)]
    for stream in streams:
        stream.wait_tokens(50)
    one, other = (session.route[place].peer for session in swarm.sessions())
    assert one != other, "one server took both"
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        swarm.ask(Request(prompt_of(30, 3, VOCAB), NEW))
    swarm.kill(one)
    swarm.wait_session(lambda session: session.state == "held")
    eventually("the session goes on", lambda: swarm.faults().resumed > before.resumed)
    counts = [stream.count for stream in streams]
    for stream, count in zip(streams, counts, strict=True):
        check_answer(stream.read_and_cancel(count + READ_ON))
    assert swarm.faults().resumed == before.resumed + 1
    swarm.wait_empty()
    check_answer(swarm.ask(Request(prompt_of(30, 3, VOCAB), READ_ON)))
    swarm.wait_empty()
