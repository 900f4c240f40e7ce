"""A link loses everything in one direction under a stream: the stream continues without that link.

Real processes with `chaos.proxy` between them. The connections stay open and the other direction works, so no error is
reported. The gateway has to find the faulty link, and must not re-route around other servers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from support.chaos.proxy import LinkFaults
from support.chaos.swarm import Plan, World, world
from support.models.tiny_models import TOY_BLOCKS, TOY_LENGTH, VOCAB
from support.processes.kill_scenarios import SAMPLED, ask_until, prompt_of
from support.processes.oracles import check_contiguous, check_hash
from support.processes.streams import Request
from support.processes.swarm import Running

from modelswarm.local.run_folder import GATEWAY_JOB
from modelswarm.protocol.identity import name_of

pytestmark = pytest.mark.full  # depends on timing

NEW = 500  # tokens of the answer
WITHIN = 14.0  # seconds for a stream after its first lost frame; silent links are closed after 15 s
TRIES = 3
LOOK_SECONDS = 0.02
CAUSE = "partition"


@pytest.fixture(scope="module")
def scene(toy_folder: Path) -> Iterator[World]:
    with world(toy_folder, Plan("hash", seed=1)) as made:
        yield made


# In this order: a link that lost rows is a last resort for 30 s. A session that then loses its tail
# may have to leave its head as well.
@pytest.mark.parametrize("link", ["tail to gateway", "head to tail", "tail to head"])
def test_one_way_partition_reroutes_only_its_link(scene: World, link: str) -> None:
    """Another server may be silent for lack of a free core, so one of `TRIES` tries must be without."""
    others = [one_direction_dies(scene, link)]
    while others[-1] and len(others) < TRIES:
        others.append(one_direction_dies(scene, link))
    assert others[-1] == 0, "servers were suspected whose links were well"


def one_direction_dies(scene: World, link: str) -> int:
    """Cut one direction of the link; return the number of other servers that were found to be silent."""
    swarm = scene.running
    before, silent = swarm.faults(), swarm.ejections("silent")
    affected = scene.network.affected[CAUSE]
    stream = swarm.start(Request(prompt_of(200, 7, VOCAB), NEW, SAMPLED))
    stream.wait_tokens(30)
    route = _route(swarm)
    places = dict(zip(("head", "tail"), route, strict=True))
    source, to = link.split(" to ")
    ends = {places[end] for end in (source, to) if end in places}
    with _Watch(swarm, [tuple(route)]) as watch:
        end_faults = scene.network.disturb(
            LinkFaults(_name(places, source), _name(places, to), blocked=True, cause=CAUSE)
        )
        began, had = time.monotonic(), stream.count
        try:
            answer = stream.answer()
            took = time.monotonic() - began
        finally:
            end_faults()
    assert scene.network.affected[CAUSE] > affected, "the link was not used"
    assert had < NEW - 100, "it was over before the link was dead"
    check_contiguous(answer)
    check_hash(answer, n_blocks=TOY_BLOCKS, vocabulary=VOCAB, length=TOY_LENGTH)
    assert swarm.faults().resumed > before.resumed
    assert took < WITHIN
    assert watch.left, f"the route never changed: {watch.routes}"
    others = swarm.ejections("silent") - silent - (link == "tail to gateway")
    assert others >= 0, "the silence was not found"
    assert len(watch.left - ends) <= others, f"{watch.left - ends} were left: {watch.routes}"
    assert len(watch.ejected - ends) <= others, f"{watch.ejected - ends} were ejected"
    make_well(swarm)
    return others


def make_well(swarm: Running) -> None:
    """Wait until all servers are used again: an ejected server needs a token of its canary session."""
    swarm.wait_whole()

    ask_until(
        swarm,
        "all are used again",
        lambda: not any(server.state for server in swarm.view.explain_routes().servers),
    )
    swarm.wait_empty()


@dataclass(slots=True)
class _Watch:
    """Records the routes in use and the servers that are not linked, every 20 ms."""

    swarm: Running
    routes: list[tuple[str, ...]] = field(default_factory=list)  # distinct from the route before
    ejected: set[str] = field(default_factory=set)  # ejected, suspected or unlinked
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> _Watch:
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._thread is not None
        assert self._thread.is_alive(), "it could not look"
        self._stopping.set()
        self._thread.join()

    @property
    def left(self) -> set[str]:
        return {peer for here, there in pairwise(self.routes) for peer in here if peer not in there}

    def _look(self) -> None:
        while not self._stopping.wait(LOOK_SECONDS):
            self.ejected |= _unwell(self.swarm)
            for session in self.swarm.sessions():
                route = tuple(hop.peer for hop in session.route)
                if session.state == "running" and route not in self.routes[-1:]:
                    self.routes.append(route)


def _route(swarm: Running) -> list[str]:
    return [hop.peer for hop in swarm.only_session().route]


def _name(places: dict[str, str], end: str) -> str:
    return name_of(places[end]) if end in places else GATEWAY_JOB


def _unwell(swarm: Running) -> set[str]:
    """Return the servers that are suspected, ejected or not linked."""
    servers = {server.peer: server.health for server in swarm.view.fetch_snapshot().servers}
    members = {member.peer for member in swarm.members()}
    return {peer for peer in members if servers.get(peer) != "linked"}
