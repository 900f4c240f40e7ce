"""State that a closed session must not leave: hops that were refused, are unknown, or were created twice."""

from __future__ import annotations

import itertools

import pytest
from support.core.scripted_server import server_hello

from modelswarm.protocol.messages import (
    Close,
    Fence,
    FenceAck,
    Refusal,
    Sampling,
    Send,
    Token,
)
from modelswarm_gateway.core.gateway import GatewayCore
from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest


def fences(core: GatewayCore) -> dict[str, Fence]:
    """Return the fences that wait to be sent, by server."""
    return {
        effect.to.peer: effect.item
        for effect in core.take_effects()
        if isinstance(effect, Send) and isinstance(effect.item, Fence)
    }


def answer(core: GatewayCore, peer: str, fence: Fence, refused: Refusal | None = None) -> None:
    own = 0 if refused is not None else fence.handle or 77
    core.receive(peer, FenceAck(fence.gateway_handle, own, fence.epoch, refusal=refused), 0.0)


def test_refused_hops_are_forgotten_with_their_session() -> None:
    """The second refusal arrives when the first has ended the turn: nothing is left to close at that server."""
    core = GatewayCore(GatewaySettings(), "g/1/0", 1, itertools.count(1).__next__)
    core.on_peer_connected(server_hello("a", 0, 1, n_blocks=2), 0.0)
    core.on_peer_connected(server_hello("b", 1, 2, n_blocks=2), 0.0)
    core.open_session("s", "m", 0.0)
    core.start_turn("s", TurnRequest((1, 2), 1, Sampling()), 0.0)
    asked = fences(core)
    for peer, fence in asked.items():
        answer(core, peer, fence)
    tail = asked["b/1/0"]
    core.receive("b/1/0", Token(tail.gateway_handle, tail.epoch, 2, 5, 0.0), 0.0)
    core.truncate_turn("s", 3, 0.0)
    for peer, boot in (("a", 0), ("b", 1)):
        core.on_peer_lost(f"{peer}/1/0", 0.0)
        core.on_peer_connected(server_hello(f"{peer}x", boot, boot + 1, n_blocks=2), 0.0)
    core.take_effects()
    core.start_turn("s", TurnRequest((1, 2, 5), 1, Sampling()), 0.0)
    asked = fences(core)
    answer(core, "bx/1/0", asked["bx/1/0"], Refusal.NO_PAGES)
    assert any(isinstance(effect, Refused) for effect in core.take_effects())
    answer(core, "ax/1/0", asked["ax/1/0"], Refusal.NO_PAGES)
    core.close_session("s", 0.0)
    assert not core._recovery.hops.by_handle
    assert not core._recovery.hops.closing


@pytest.mark.parametrize("early", [1, 0])
def test_hop_created_under_two_handles_is_closed_under_both(early: int) -> None:
    """Another gateway held the hop between both creates, so the second one made a new hop.

    `early`: number of acks that come before the session closes.
    """
    core = GatewayCore(GatewaySettings(), "g/1/0", 1, itertools.count(1).__next__)
    core.on_peer_connected(server_hello("a", 0, 1, n_blocks=2), 0.0)
    core.on_peer_connected(server_hello("b", 1, 2, n_blocks=2), 0.0)
    core.open_session("s", "m", 0.0)
    core.start_turn("s", TurnRequest((1, 2), 1, Sampling()), 0.0)
    first = fences(core)
    asked = [first["a/1/0"]]
    core.on_peer_connected(server_hello("c", 1, 2, n_blocks=2), 0.0)
    core.on_peer_lost(next(each for each in first if each != "a/1/0"), 0.0)
    asked.append(fences(core)["a/1/0"])
    assert all(fence.create is not None for fence in asked)
    acks = [FenceAck(fence.gateway_handle, 70 + n, fence.epoch) for n, fence in enumerate(asked)]
    for ack in acks[:early]:
        core.receive("a/1/0", ack, 0.0)
    closed = closed_handles(core)
    core.close_session("s", 0.0)
    for ack in acks[early:]:
        core.receive("a/1/0", ack, 0.0)
    assert closed + closed_handles(core) == [70, 71]
    assert "a/1/0" not in {hop.peer for _, hop in core._recovery.hops.by_handle.values()}


def closed_handles(core: GatewayCore) -> list[int]:
    """Return the handles in the Close messages that wait to be sent."""
    return [
        effect.item.handle
        for effect in core.take_effects()
        if isinstance(effect, Send) and isinstance(effect.item, Close)
    ]
