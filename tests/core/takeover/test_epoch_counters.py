"""Epoch counters: those of ended sessions are kept by name, and absurd ones that servers state are not believed."""

from __future__ import annotations

import random

import pytest
from support.core.gateway import add_gateway, takeover_network
from support.core.network import Network
from support.core.server import MODEL, expected

from modelswarm.protocol.identity import MAX_NUMBER, NO_EPOCH, Epoch
from modelswarm.protocol.messages import HopInfo, SessionInfo
from modelswarm_gateway.core.sessions.epoch_counters import (
    MAX_STATED_COUNTER,
    EpochCounters,
    without_absurd_epochs,
)

PROMPT = [random.Random(at).randrange(97) for at in range(12)]
NEW = 12
NAME = "named"
GREATEST = Epoch(MAX_STATED_COUNTER, 1)
ABSURD = Epoch(MAX_STATED_COUNTER + 1, 1)


def swarm() -> Network:
    made = takeover_network(None)
    made.serve(0, 2)
    made.serve(2, 4)
    return made


def test_session_starts_above_the_last_one_of_its_name() -> None:
    gateway = add_gateway(swarm(), 1)
    gateway.start(NAME, PROMPT, NEW, above=1000)
    gateway.core.close_session(NAME, gateway.network.now)
    for name in (NAME, "other"):
        gateway.core.open_session(name, MODEL, gateway.network.now, above=0)
    assert gateway.view(NAME).epoch.counter > 1000
    assert gateway.view("other").epoch.counter == 0, "another name has its own counter"


def test_counters_of_names_beyond_the_limit_count_for_all() -> None:
    counters = EpochCounters(max_names=2)
    for name, counter in (("a", 7), ("b", 5), ("a", 3), ("c", 2)):
        counters.record_end(name, counter)
    assert [counters.counter_of(name) for name in ("a", "b", "c", "d")] == [7, 5, 2, 5]
    counters.record_end("d", 1)
    assert [counters.counter_of(name) for name in ("a", "b", "c", "d")] == [7, 7, 2, 1]


@pytest.mark.parametrize("counter", [MAX_STATED_COUNTER + 1, MAX_NUMBER - 1000])
def test_session_left_with_an_absurd_epoch_is_opened_anew(counter: int) -> None:
    """Another gateway fences hops under a name, releases its lease and ends."""
    made = swarm()
    other, gateway = add_gateway(made, 1), add_gateway(made, 2)
    other.start(NAME, PROMPT, NEW, ahead=2, above=counter)
    other.core.relinquish_sessions(made.now)
    made.run()
    made.kill(other.peer)

    where = gateway.find(NAME)
    assert (where.epoch, where.hops, where.log_holders) == (NO_EPOCH, (), ())
    gateway.start(NAME, PROMPT, NEW, above=where.epoch.counter)
    assert gateway.tokens(NAME) == expected(PROMPT, NEW)
    assert gateway.view(NAME).epoch.counter < 10


@pytest.mark.parametrize(
    "found",
    [
        SessionInfo(NAME, ABSURD, "g", hops=(HopInfo(0, 2, 3, 4, GREATEST),)),
        SessionInfo(NAME, GREATEST, "g", hops=(HopInfo(0, 2, 3, 4, ABSURD),)),
        SessionInfo(NAME, GREATEST, "g", last_started=ABSURD),
        SessionInfo(NAME, ABSURD, claimant="g/1/a", search_id=7),
    ],
)
def test_answer_with_an_absurd_epoch_counts_as_empty(found: SessionInfo) -> None:
    empty = SessionInfo(NAME, NO_EPOCH, claimant=found.claimant, search_id=found.search_id)
    assert without_absurd_epochs(found) == empty
    usual = SessionInfo(NAME, GREATEST, "g", hops=(HopInfo(0, 2, 3, 4, GREATEST),))
    assert without_absurd_epochs(usual) == usual
