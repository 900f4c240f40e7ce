"""A stop string found after the servers have finished the turn: the log keeps nothing behind it (R17, sampling)."""

from __future__ import annotations

from support.gateway_service import make_service_with_model

from modelswarm.protocol.messages import FenceAck, Finish, Sampling, Token
from modelswarm_gateway.backend.token_stream import TokenStream
from modelswarm_gateway.core.interface.turn import TurnRequest
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import MODEL

SERVER = "s0/1/x"
PROMPT, ANSWER = (5, 6, 7), (8, 9, 10)


def finish_turn(node: Node, session: str, prompt: tuple[int, ...]) -> TokenStream:
    """Run a turn whose whole answer comes before its reader has taken a token."""
    stream = node.start_turn(session, TurnRequest(prompt, len(ANSWER), Sampling()))
    [(handle, (running, hop))] = node._core._recovery.hops.by_handle.items()
    node.on_items(SERVER, [FenceAck(handle, hop.server_handle or 1, running.epoch)])
    ends = [Finish.NONE] * (len(ANSWER) - 1) + [Finish.LENGTH]
    node.on_items(
        SERVER,
        [
            Token(handle, running.epoch, position, token, finish=end)
            for position, (token, end) in enumerate(
                zip(ANSWER, ends, strict=True), start=len(prompt)
            )
        ],
    )
    assert stream.has_ended
    return stream


def log_of(node: Node, session: str) -> tuple[int, ...]:
    kept = node.parked_turn(session)
    assert kept is not None
    return kept.tokens


async def test_stop_in_a_finished_turn_truncates_its_log() -> None:
    _, node = make_service_with_model()
    session = node.open_session(MODEL)
    stream = finish_turn(node, session, PROMPT)
    assert log_of(node, session) == PROMPT + ANSWER

    stream.stop_at(len(PROMPT) + 1)
    assert log_of(node, session) == PROMPT + ANSWER[:1]


async def test_stop_of_an_earlier_turn_changes_no_later_one() -> None:
    _, node = make_service_with_model()
    session = node.open_session(MODEL)
    earlier = finish_turn(node, session, PROMPT)
    node.start_turn(session, TurnRequest(PROMPT + ANSWER, 2, Sampling()))

    earlier.stop_at(len(PROMPT) + 1)
    assert log_of(node, session) == PROMPT + ANSWER


async def test_stop_in_the_turn_of_a_closed_session_is_ignored() -> None:
    _, node = make_service_with_model()
    session = node.open_session(MODEL)
    stream = finish_turn(node, session, PROMPT)
    node.close_session(session)

    stream.stop_at(len(PROMPT) + 1)
    assert node.parked_turn(session) is None
