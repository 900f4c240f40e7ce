"""Holes of ownership that the model found (R20, ownership), on the real cores."""

from __future__ import annotations

import pytest
from core.takeover.test_takeover import NEW, PROMPT, SESSION, WHOLE, start_partial_turn
from support.core.gateway import LEASE, add_gateway, takeover_network
from support.core.named_sessions import NAME, GatewaySessions

from modelswarm.protocol.messages import Lane
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.generation.session_locator import OwnedElsewhere


def test_log_of_a_replaced_hop_outlives_its_gateway() -> None:
    """A server answers too late, so the route goes over another one. The gateway ends before that one has the log."""
    made = takeover_network()
    servers = [made.serve(0, 4), made.serve(0, 4)]
    first, second = start_partial_turn(made), add_gateway(made, 2)
    read = [*PROMPT, *first.tokens(SESSION)]
    [old] = first.route(SESSION)
    [spare] = [server for server in servers if server.peer != old]
    first.core.cancel_turn(SESSION, made.now)
    made.run()
    made.servers[old].frozen = spare.frozen = True
    first.begin(SESSION, read, len(WHOLE) - len(read))
    made.wait(0.6)
    assert first.route(SESSION) == [spare.peer], "the Fence of the old server was not answered"
    made.servers[old].frozen = False
    made.run()
    made.kill(first.peer)
    spare.frozen = False
    made.wait(LEASE + 0.2)
    assert second.find(SESSION).log_holders, "the server that has the log is alive"


def test_late_answer_leaves_one_owner() -> None:
    """A gateway stalls for a lease and asks. Its server answers late, and has a new owner right after that answer."""
    made = takeover_network()
    servers = [made.serve(0, 4), made.serve(0, 4)]
    first, second = start_partial_turn(made), add_gateway(made, 2)
    [old] = first.route(SESSION)
    first.frozen = True
    made.wait(LEASE + 0.2)
    log = second.adopt(second.find(SESSION))
    made.collect()
    made.held |= {(second.peer, each.peer, Lane.LIVE) for each in servers}
    made.held |= {(old, first.peer, Lane.LIVE)}
    second.begin(SESSION, log, NEW, ahead=2)
    made.collect()
    first.frozen = False
    made.wait(0.1)
    made.held -= {(second.peer, each.peer, Lane.LIVE) for each in servers}
    made.run()
    made.wait(1.0)
    made.held.clear()
    made.wait(5.0)
    views = [gateway.core.find_view(SESSION) for gateway in (first, second)]
    running = [view.state for view in views if view is not None]
    assert running == ["running"], "all servers are in reach of both"


@pytest.mark.parametrize("is_started", [True, False])
def test_name_of_a_starting_session_is_not_opened_again(is_started: bool) -> None:
    """A gateway loses its first route before the prompt or the FenceAck arrives. Its Fence to another server is slow.

    Another gateway searches for the name meanwhile, and finds hops that never ran.
    """
    made = takeover_network()
    servers = [made.serve(0, 4), made.serve(0, 4)]
    settings = GatewaySettings(lease_seconds=LEASE, max_live_input_tokens=0)
    first, second = add_gateway(made, 1, settings), add_gateway(made, 2)
    sessions = GatewaySessions(second)
    made.run()
    if is_started:
        made.held = {(first.peer, each.peer, Lane.BULK) for each in servers}
    else:
        made.held = {(each.peer, first.peer, Lane.LIVE) for each in servers}
    first.start(NAME, PROMPT, NEW, ahead=2, above=0)
    [old] = first.route(NAME)
    [spare] = [server.peer for server in servers if server.peer != old]
    made.held = {(first.peer, spare, Lane.LIVE)}
    made.cut_link(first.peer, old)

    def reconnect() -> None:
        made.held.clear()
        made.link(first.peer, old)

    with pytest.raises(OwnedElsewhere):
        sessions.acquire_session(PROMPT, after=1.0, event=reconnect)
    assert first.view(NAME).state == "running"


def test_session_without_hops_asks_when_it_returns() -> None:
    """All links break before the first Fences arrive. Another gateway opens the name; the first one returns soon."""
    made = takeover_network()
    servers = [made.serve(0, 4), made.serve(0, 4)]
    first, second = add_gateway(made, 1), add_gateway(made, 2)
    made.run()
    first.begin(NAME, PROMPT, NEW, ahead=2, above=0)
    for server in servers:
        made.cut_link(first.peer, server.peer)
    sessions = GatewaySessions(second)
    second.start(NAME, PROMPT, NEW, ahead=2, above=sessions.acquire_session(PROMPT))
    [taken] = second.route(NAME)
    for server in sorted(servers, key=lambda each: each.peer == taken):
        made.link(first.peer, server.peer)
        made.run()
    made.wait(3.0)
    views = [gateway.core.find_view(NAME) for gateway in (first, second)]
    running = [view.state for view in views if view is not None]
    assert running == ["running"], "all servers are in reach of both"


def test_log_of_a_taken_hop_outlives_its_new_owner() -> None:
    """A gateway returns from a stall, outranks the one that has taken its session over, and ends before it starts."""
    made = takeover_network()
    server = made.serve(0, 4)
    first, second = start_partial_turn(made, 3), add_gateway(made, 2)
    first.frozen = True
    made.wait(LEASE + 0.2)
    log = second.adopt(second.find(SESSION))
    made.run()
    first.frozen = False
    first.tick(made.now)
    made.run(until=lambda: [hop.gateway for hop in server.core._fencing.hops] == [first.peer])
    made.kill(first.peer)
    if second.core.find_view(SESSION) is not None:
        second.begin(SESSION, log, len(WHOLE) - len(log))
    made.wait(LEASE + 1.0)
    if second.core.find_view(SESSION) is None:
        assert second.find(SESSION).log_holders, "the server that had the log is alive"
