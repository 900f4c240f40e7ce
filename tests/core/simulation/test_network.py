"""The simulated links have the guarantees of real ones and no others: order within a lane of a link, none across."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.simulator.clock import Clock
from support.simulator.network import Endpoint, Network
from support.simulator.scenario import Conditions
from support.simulator.trace import Trace

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import Close, Item, Lane, Send, reply_address


class Recorder:
    """An endpoint that records messages and link events."""

    def __init__(self, name: str, boot: int = 0, *, dialable: bool = True) -> None:
        self.name = name
        self.alive = True
        self.resumes_at = 0.0
        self.replaces: tuple[PeerId, ...] = ()
        self.address = Address(f"{name}/1/{boot}", f"{name}:1" if dialable else "")
        self.received: list[int] = []
        self.links: list[str] = []

    def on_link_up(self, other: Endpoint) -> None:
        self.links.append(f"+{other.name}")

    def on_link_down(self, peer: PeerId) -> None:
        self.links.append(f"-{peer.split('/')[0]}")

    def on_item(self, peer: PeerId, item: Item) -> None:
        assert isinstance(item, Close)
        self.received.append(item.handle)


def build(
    conditions: Conditions, seed: int = 0, *names: str
) -> tuple[Clock, Network, list[Recorder]]:
    clock = Clock()
    network = Network(clock, random.Random(seed), conditions, Trace())
    ends = [Recorder(name) for name in names or ("a", "b")]
    for end in ends:
        network.join(end)
    return clock, network, ends


def send_all(
    network: Network, one: Recorder, to: Address, numbers: Sequence[int], lane: Lane
) -> None:
    for number in numbers:
        network.send(one.address.peer, Send(to, lane, Close(number)))


def run(clock: Clock) -> None:
    while clock.step():
        pass


def test_order_holds_within_a_lane_only() -> None:
    mixed = 0
    for seed in range(20):
        clock, network, (a, b) = build(Conditions(bulk_factor=5.0), seed)
        send_all(network, a, b.address, range(10), Lane.LIVE)
        send_all(network, a, b.address, range(100, 110), Lane.BULK)
        run(clock)
        assert [n for n in b.received if n < 100] == list(range(10))
        assert [n for n in b.received if n >= 100] == list(range(100, 110))
        mixed += b.received != sorted(b.received)
    assert mixed


def test_two_links_of_a_pair_have_no_common_order() -> None:
    """Each side sends on the link that it dialled, and these have no common order."""
    clock, network, (a, b) = build(Conditions())
    send_all(network, a, b.address, [1], Lane.LIVE)
    send_all(network, b, a.address, [2], Lane.LIVE)
    run(clock)
    assert (a.received, b.received) == ([2], [1])
    assert (a.links, b.links) == (["+b"], ["+a"])


def test_broken_link_loses_a_tail_and_notifies_both_sides_once() -> None:
    lost = 0
    for seed in range(20):
        clock, network, (a, b) = build(Conditions(), seed)
        send_all(network, a, b.address, [0], Lane.LIVE)
        send_all(network, b, a.address, [0], Lane.LIVE)
        run(clock)
        send_all(network, a, b.address, range(1, 10), Lane.LIVE)
        network.drop("b", "a")
        run(clock)
        assert b.received == list(range(len(b.received)))
        assert (a.links, b.links) == (["+b", "-b"], ["+a", "-a"])
        lost += 10 - len(b.received)
    assert lost


def test_dial_to_killed_or_restarted_process_fails() -> None:
    clock, network, (a, b) = build(Conditions())
    b.alive = False
    network.remove(b.address.peer)
    network.join(Recorder("b", boot=1))
    send_all(network, a, b.address, [1], Lane.LIVE)
    run(clock)
    assert (a.links, b.received) == (["-b"], [])


def test_parted_processes_cannot_link_from_either_side() -> None:
    clock, network, (a, b) = build(Conditions())
    network.part("a", "b", 0.0)
    send_all(network, a, b.address, [1], Lane.LIVE)
    send_all(network, b, a.address, [1], Lane.LIVE)
    run(clock)
    assert (a.links, b.links, a.received, b.received) == (["-b"], ["-a"], [], [])


def test_duplicates_stop_with_their_link() -> None:
    clock, network, (a, b) = build(Conditions(duplicate_chance=1.0))
    send_all(network, a, b.address, range(5), Lane.LIVE)
    run(clock)
    assert sorted(b.received) == sorted([*range(5), *range(5)])
    send_all(network, a, b.address, range(5, 10), Lane.LIVE)
    network.drop("a", "b")
    run(clock)
    assert network.repeated == 5


def test_reply_without_a_link_is_lost() -> None:
    clock, network, (a, _) = build(Conditions())
    send_all(network, a, reply_address("gateway/1/0"), [1], Lane.LIVE)
    run(clock)
    assert network.lost == 1
