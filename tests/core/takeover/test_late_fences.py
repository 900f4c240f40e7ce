"""A Fence of a gateway that has released its session, granted late: it may end a turn, no session (R20, takeover)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from core.takeover.test_rival_takeovers import start_rivals
from core.takeover.test_takeover import NEW, SESSION, WHOLE
from support.core.gateway import LEASE, Gateway, add_gateway
from support.core.server import expected

from modelswarm.protocol.identity import Epoch
from modelswarm.protocol.messages import Fence, Lane, Sampling
from modelswarm_gateway.core.interface.effects import OwnershipLost


def running(*gateways: Gateway) -> list[str]:
    views = [(each.peer, each.core.find_view(SESSION)) for each in gateways]
    return [peer for peer, view in views if view is not None and view.state == "running"]


@pytest.mark.parametrize("is_linked", [True, False])
@pytest.mark.parametrize("hears_of_tail_first", [True, False])
def test_late_fence_of_a_gateway_that_has_let_go(
    hears_of_tail_first: bool, is_linked: bool
) -> None:
    """The lower one has started the head. The higher one has raised its epoch often. It hears of that and lets go.

    Its Fence to the tail arrives after that, and before the StartEpoch of the lower one. Perhaps its link breaks then,
    so that no Close follows.
    """
    rivals = start_rivals()
    network, low, high = rivals.network, rivals.low, rivals.high
    head, tail = rivals.head.peer, rivals.tail.peer
    rivals.take_over(low)
    network.run()
    rivals.begin(low, rivals.log, Sampling())
    rivals.run_until_start(low)
    rivals.hold(low, rivals.tail)
    network.deliver_all(low.peer, head)
    rivals.hold(high, rivals.tail)
    where, found = rivals.found[high.peer]
    tried = Epoch(where.epoch.counter + 10, where.epoch.gateway)
    rivals.found[high.peer] = replace(where, epoch=tried), found
    rivals.take_over(high)
    network.run()
    assert high.all(OwnershipLost)
    lane = (high.peer, tail, Lane.LIVE)
    assert isinstance(network.lanes[lane][0], Fence)
    network.deliver(lane)
    assert rivals.owners == [low.peer, high.peer], "granted to a gateway that has let go"
    if not is_linked:
        network.cut_link(high.peer, tail)
    if hears_of_tail_first:
        network.held = {(head, low.peer, Lane.LIVE)}
    else:
        network.held = {(tail, low.peer, Lane.LIVE)}
    network.wait(0.2)
    rivals.release()
    network.wait(LEASE + 0.2)
    assert len(running(low, high)) <= 1
    assert bool(low.all(OwnershipLost)) is hears_of_tail_first, "gives way to that hop's rank"
    if not hears_of_tail_first:
        assert low.tokens(SESSION) == expected(rivals.log, NEW)
        return
    third = add_gateway(network, 4)
    log = third.adopt(third.find(SESSION))
    third.start(SESSION, log, len(WHOLE) - len(log))
    assert [*log, *third.tokens(SESSION)] == WHOLE
