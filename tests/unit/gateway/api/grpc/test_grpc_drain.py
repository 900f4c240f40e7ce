"""One call of `Swarm.Drain`: the states that it streams while a server is drained, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from support.core.scripted_server import Script
from support.eventually import SECONDS

from modelswarm.protocol.identity import PeerId, name_of
from modelswarm.protocol.messages import Close, DrainState, Heartbeat
from modelswarm.protocol.wire import api_pb2
from modelswarm_gateway.api.grpc.admin.drain import run_drain
from modelswarm_gateway.errors import ApiError, Code
from modelswarm_gateway.runtime.core_driver import CoreDriver
from modelswarm_gateway.runtime.drains import Drains

PROMPT = tuple(range(1, 21))


def make_two_tails(is_running: Callable[[PeerId], bool] = lambda _: False) -> tuple[Script, Drains]:
    """Return a session over `a` and `b`; `c` holds the same blocks as `b` and answers nothing."""
    script = Script()
    script.add_server("a", 0, 2)
    script.add_server("b", 2, 4)
    script.start_turn("s", PROMPT)
    script.token("s")
    script.server(script.add_server("c", 2, 4)).silent = True
    return script, Drains(CoreDriver(script.core, lambda: script.now, script.run), is_running)


async def test_drain_undone_by_another_call_ends_with_an_error() -> None:
    _, drains = make_two_tails()
    states = run_drain(drains, api_pb2.DrainRequest(server="b"), lambda: True)
    first = await anext(states)
    assert first.own_sessions == 1 and not first.done
    [undone] = [
        s async for s in run_drain(drains, api_pb2.DrainRequest(server="b", undo=True), bool)
    ]
    assert not undone.done
    with pytest.raises(ApiError) as raised:
        async with asyncio.timeout(SECONDS):
            async for _ in states:
                pass
    assert raised.value.code is Code.DRAIN_UNDONE and "b" in str(raised.value)


async def test_drain_of_an_unknown_server_lists_the_known_ones() -> None:
    _, drains = make_two_tails()
    with pytest.raises(ApiError) as raised:
        await anext(run_drain(drains, api_pb2.DrainRequest(server="z"), lambda: True))
    assert str(raised.value) == "there is no server 'z'; known are: a, b, c"


async def test_drain_that_would_uncover_blocks_names_them() -> None:
    _, drains = make_two_tails()
    with pytest.raises(ApiError) as raised:
        await anext(run_drain(drains, api_pb2.DrainRequest(server="a"), lambda: True))
    assert raised.value.code is Code.BLOCKS_UNCOVERED and "blocks 0:2" in str(raised.value)


async def test_drain_is_done_when_the_server_reports_no_sessions() -> None:
    script, drains = make_two_tails()
    c = "c/1/0"
    states = run_drain(drains, api_pb2.DrainRequest(server="c"), lambda: True)
    script.send(c, Heartbeat(drain=DrainState.SERVE))
    assert not (await anext(states)).done, "its state is older than the drain request"
    assert [heartbeat.drain for heartbeat in script.sent_to(c, Heartbeat)] == [DrainState.DRAIN]
    script.send(c, Heartbeat(drain=DrainState.SERVE))
    assert drains.view_server(c).draining and not drains.is_empty(c)  # type: ignore[union-attr]
    script.send(c, Heartbeat(drain=DrainState.DRAIN, sessions=2))
    second = await anext(states)
    assert (second.own_sessions, second.other_sessions, second.done) == (0, 2, False)
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    assert not (await anext(states)).done
    script.send(c, Heartbeat(drain=DrainState.DRAIN, sessions=1))
    late = await anext(states)
    # This session was opened while the drain request was in transit.
    assert (late.other_sessions, late.done) == (1, False)
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    assert [state.done for state in [s async for s in states]] == [False, True]


async def test_idle_sessions_close_before_the_drain_heartbeat() -> None:
    """The server would count idle sessions as those of another gateway for seconds."""
    script, drains = make_two_tails()
    script.core.cancel_turn("s", script.now)
    script.run()
    script.record.clear()
    drains.drain_server("b/1/0")
    sent = [type(send.item) for _, send in script.record if send.to.peer == "b/1/0"]
    assert sent == [Close, Heartbeat]


async def test_drain_undone_at_another_gateway_ends_here_too() -> None:
    script, drains = make_two_tails()
    states = run_drain(drains, api_pb2.DrainRequest(server="b"), lambda: True)
    await anext(states)
    script.send("b/1/0", Heartbeat(drain=DrainState.DRAIN, sessions=1))
    script.send("b/1/0", Heartbeat(drain=DrainState.SERVE, sessions=1))
    with pytest.raises(ApiError) as raised:
        async with asyncio.timeout(SECONDS):
            async for _ in states:
                pass
    assert raised.value.code is Code.DRAIN_UNDONE


async def test_drain_state_reported_by_a_server_is_adopted() -> None:
    script, _ = make_two_tails()
    for drain, cause in ((DrainState.DRAIN, "drain"), (None, "drain"), (DrainState.SERVE, "")):
        script.send("b/1/0", Heartbeat(drain=drain, sessions=1))
        assert {v.peer: v.drain_cause for v in script.core.server_views()}["b/1/0"] == cause


def reconnect(script: Script, peer: PeerId) -> None:
    """Lose the link of a server and connect it again."""
    script.core.on_peer_lost(peer, script.now)
    script.add_server(name_of(peer), 2, 4)


async def test_drain_request_lost_with_the_link_is_sent_again() -> None:
    script, drains = make_two_tails()
    c = "c/1/0"
    drains.drain_server(c)
    reconnect(script, c)
    script.record.clear()
    script.send(c, Heartbeat())
    assert [heartbeat.drain for heartbeat in script.sent_to(c, Heartbeat)] == [DrainState.DRAIN]
    script.send(c, Heartbeat())
    assert not drains.is_empty(c), "other gateways do not know of an unconfirmed drain"
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    assert drains.is_empty(c)


async def test_undo_lost_with_the_link_is_sent_again() -> None:
    script, drains = make_two_tails()
    c = "c/1/0"
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    drains.undrain_server(c)
    reconnect(script, c)
    script.record.clear()
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    assert drains.is_cancelled(c)
    assert [heartbeat.drain for heartbeat in script.sent_to(c, Heartbeat)] == [DrainState.SERVE]
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    assert drains.is_cancelled(c), "its state is older than the undo"
    script.send(c, Heartbeat(drain=DrainState.SERVE))
    script.send(c, Heartbeat(drain=DrainState.DRAIN))
    assert not drains.is_cancelled(c)


@pytest.mark.parametrize("drain", [DrainState.SERVE, DrainState.DRAIN])
async def test_drain_state_changed_during_link_loss_is_adopted(
    drain: DrainState,
) -> None:
    script, drains = make_two_tails()
    c = "c/1/0"
    drains.drain_server(c)
    reconnect(script, c)
    script.record.clear()
    script.send(c, Heartbeat(drain=drain))
    assert drains.is_cancelled(c) is (drain is DrainState.SERVE)
    assert not script.sent_to(c, Heartbeat)


async def test_server_without_link_is_not_gone_while_it_may_run() -> None:
    running = {"c/1/0"}
    script, drains = make_two_tails(running.__contains__)
    c = "c/1/0"
    states = run_drain(drains, api_pb2.DrainRequest(server="c"), lambda: True)
    script.send(c, Heartbeat(drain=DrainState.DRAIN, sessions=1))
    assert (await anext(states)).other_sessions == 1
    script.core.on_peer_lost(c, script.now)
    broken = await anext(states)
    assert not broken.done and not broken.gone
    script.add_server("c", 2, 4)
    script.send(c, Heartbeat(drain=DrainState.DRAIN, sessions=1))
    again = await anext(states)
    assert again.other_sessions == 1 and not again.done
    script.core.on_peer_lost(c, script.now)
    running.clear()
    assert [state.gone for state in [s async for s in states]][-1]
