"""SessionSearch alone: what it asks, whose answers it takes, and when it ends (R20, takeover)."""

from __future__ import annotations

import pytest

from modelswarm.protocol.identity import NO_EPOCH, Epoch
from modelswarm.protocol.messages import (
    FindSession,
    Lane,
    LogChunk,
    LogRequest,
    Sampling,
    Send,
    SessionInfo,
    Turn,
    reply_address,
)
from modelswarm_gateway.core.interface.effects import Effect
from modelswarm_gateway.core.interface.session_search import FetchedLog, LogHolder, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.takeover.session_search import SessionSearch

SETTINGS = GatewaySettings(search_seconds=2.0, log_fetch_seconds=5.0)
EPOCH = Epoch(3, 1)
TURN = Turn(reserved_positions=16, end=16, begin=2, sampling=Sampling())


@pytest.fixture
def effects() -> list[Effect]:
    return []


@pytest.fixture
def search(effects: list[Effect]) -> SessionSearch:
    return SessionSearch(SETTINGS, "g/1", effects.append)


def take(effects: list[Effect]) -> list[Effect]:
    taken = effects[:]
    effects.clear()
    return taken


def info(search_id: int, session: str = "s", claimant: str = "") -> SessionInfo:
    return SessionInfo(session, NO_EPOCH, "", claimant=claimant, search_id=search_id)


def chunk(start: int, *tokens: int, total: int = 4, epoch: Epoch = EPOCH) -> LogChunk:
    return LogChunk("s", epoch, start, total, tokens, None if start else TURN)


def ask(item: object, peer: str = "a") -> Send:
    return Send(reply_address(peer), Lane.LIVE, item)  # type: ignore[arg-type]


def test_search_ends_with_the_last_answer(search: SessionSearch, effects: list[Effect]) -> None:
    search.start_search("s", ["b", "a"], ["c"], claims=True, now=0.0)
    assert take(effects) == [
        ask(FindSession("s", True, 1), "a"),
        ask(FindSession("s", True, 1), "b"),
    ]
    search.on_session_info("a", info(1, claimant="g/2"), 0.1)
    search.on_session_info("a", info(1), 0.1)  # a second answer of one server
    search.on_session_info("x", info(1), 0.1)
    assert take(effects) == []
    search.on_session_info("b", info(1, claimant="g/1"), 0.2)
    assert take(effects) == [SessionLocation("s", NO_EPOCH, unanswered=("c",), claimant="g/2")]
    search.expire(9.0)
    assert take(effects) == []


def test_answer_to_an_earlier_search_is_not_taken(
    search: SessionSearch, effects: list[Effect]
) -> None:
    search.start_search("s", ["a"], [], claims=False, now=0.0)
    search.start_search("s", ["a"], [], claims=False, now=0.5)
    take(effects)
    search.on_session_info("a", info(1), 0.6)
    assert take(effects) == []
    search.on_session_info("a", info(2), 0.7)
    assert take(effects) == [SessionLocation("s", NO_EPOCH)]


def test_search_ends_at_its_deadline(search: SessionSearch, effects: list[Effect]) -> None:
    search.start_search("s", ["a", "b"], [], claims=True, now=1.0)
    take(effects)
    search.on_session_info("b", info(1), 1.1)
    search.expire(2.9)
    assert take(effects) == []
    search.expire(3.0)
    assert take(effects) == [SessionLocation("s", NO_EPOCH, unanswered=("a",))]


def test_search_without_linked_servers_ends_at_once(
    search: SessionSearch, effects: list[Effect]
) -> None:
    search.start_search("s", [], ["c", "b"], claims=True, now=0.0)
    assert take(effects) == [SessionLocation("s", NO_EPOCH, unanswered=("b", "c"))]


@pytest.mark.parametrize("answered", [False, True])
def test_lost_server_counts_as_unanswered(
    search: SessionSearch, effects: list[Effect], answered: bool
) -> None:
    search.start_search("s", ["a", "b"], [], claims=True, now=0.0)
    search.start_search("t", ["b"], [], claims=True, now=0.0)
    take(effects)
    if answered:
        search.on_session_info("a", info(1, claimant="g/2"), 0.1)
    search.forget_peer("x", 0.2)
    assert take(effects) == []
    search.forget_peer("a", 0.2)
    assert take(effects) == []
    search.on_session_info("b", info(1), 0.3)
    assert take(effects) == [SessionLocation("s", NO_EPOCH, unanswered=("a",))]
    search.forget_peer("b", 0.4)
    assert take(effects) == [SessionLocation("t", NO_EPOCH, unanswered=("b",))]


def test_log_is_fetched_in_chunks(search: SessionSearch, effects: list[Effect]) -> None:
    search.fetch_log("s", LogHolder("a", EPOCH), 0.0)
    assert take(effects) == [ask(LogRequest("s", EPOCH))]
    search.on_log_chunk("a", chunk(0, 1, 2), 0.5)
    search.on_log_chunk("b", chunk(2, 8, 9), 0.5)  # this server was not asked
    assert take(effects) == []
    search.on_log_chunk("a", chunk(2, 3, 4), 0.5)
    assert take(effects) == [FetchedLog("s", EPOCH, (1, 2, 3, 4), TURN)]
    search.on_log_chunk("a", chunk(2, 3, 4), 0.5)
    search.expire(9.0)
    assert take(effects) == []


@pytest.mark.parametrize("second", [chunk(1, 2, 3), chunk(3, 4), chunk(2, 3, 4, epoch=Epoch(4, 1))])
def test_fetch_fails_by_a_chunk_out_of_order_or_of_another_epoch(
    search: SessionSearch, effects: list[Effect], second: LogChunk
) -> None:
    search.fetch_log("s", LogHolder("a", EPOCH), 0.0)
    search.on_log_chunk("a", chunk(0, 1, 2), 0.5)
    take(effects)
    search.on_log_chunk("a", second, 0.5)
    assert take(effects) == [FetchedLog("s", NO_EPOCH, (), None)]


def test_fetch_fails_without_the_turn(search: SessionSearch, effects: list[Effect]) -> None:
    search.fetch_log("s", LogHolder("a", EPOCH), 0.0)
    take(effects)
    search.on_log_chunk("a", LogChunk("s", EPOCH, 0, 2, (1, 2)), 0.5)
    assert take(effects) == [FetchedLog("s", NO_EPOCH, (), None)]


def test_fetch_fails_at_its_deadline_and_with_its_holder(
    search: SessionSearch, effects: list[Effect]
) -> None:
    search.fetch_log("s", LogHolder("a", EPOCH), 1.0)
    search.fetch_log("t", LogHolder("b", EPOCH), 1.0)
    take(effects)
    search.expire(5.9)
    assert take(effects) == []
    search.forget_peer("b", 2.0)
    assert take(effects) == [FetchedLog("t", NO_EPOCH, (), None)]
    search.expire(6.0)
    assert take(effects) == [FetchedLog("s", NO_EPOCH, (), None)]


def test_parts_of_a_slow_log_extend_its_deadline(
    search: SessionSearch, effects: list[Effect]
) -> None:
    search.fetch_log("s", LogHolder("a", EPOCH), 1.0)
    search.on_log_chunk("a", chunk(0, 1, 2), 5.0)
    take(effects)
    search.expire(9.9)
    assert take(effects) == []
    search.expire(10.0)
    assert take(effects) == [FetchedLog("s", NO_EPOCH, (), None)]


def test_late_parts_of_an_earlier_fetch_do_not_end_the_next_one(
    search: SessionSearch, effects: list[Effect]
) -> None:
    search.fetch_log("s", LogHolder("a", EPOCH), 0.0)
    search.on_log_chunk("a", chunk(0, 1, 2), 0.0)
    search.expire(5.0)
    search.fetch_log("s", LogHolder("a", EPOCH), 5.0)
    take(effects)
    search.on_log_chunk("a", chunk(2, 3, 4), 5.1)
    assert take(effects) == []
    search.expire(9.9)
    search.on_log_chunk("a", chunk(0, 1, 2), 9.9)
    search.on_log_chunk("a", chunk(2, 3, 4), 9.9)
    assert take(effects) == [FetchedLog("s", EPOCH, (1, 2, 3, 4), TURN)]
