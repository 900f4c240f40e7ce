"""The simulated links promise what real ones do and no more: order within a lane of a link, none across."""

from __future__ import annotations

import random
from collections.abc import Sequence

from support.simulator.clock import Clock
from support.simulator.network import Endpoint, Network
from support.simulator.scenario import Weather
from support.simulator.trace import Trace

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.messages import Close, Item, Lane, Send, reply_address


class Recorder:
    """An endpoint that only remembers what it heard."""

    def __init__(self, name: str, boot: int = 0, *, dialable: bool = True) -> None:
        self.name = name
        self.alive = True
        self.wakes_at = 0.0
        self.address = Address(f"{name}/1/{boot}", f"{name}:1" if dialable else "")
        self.heard: list[int] = []
        self.links: list[str] = []

    def linked(self, other: Endpoint) -> None:
        self.links.append(f"+{other.name}")

    def unlinked(self, peer: PeerId) -> None:
        self.links.append(f"-{peer.split('/')[0]}")

    def received(self, peer: PeerId, item: Item) -> None:
        assert isinstance(item, Close)
        self.heard.append(item.handle)


def build(weather: Weather, seed: int = 0, *names: str) -> tuple[Clock, Network, list[Recorder]]:
    clock = Clock()
    network = Network(clock, random.Random(seed), weather, Trace())
    ends = [Recorder(name) for name in names or ("a", "b")]
    for end in ends:
        network.join(end)
    return clock, network, ends


def say(network: Network, one: Recorder, to: Address, numbers: Sequence[int], lane: Lane) -> None:
    for number in numbers:
        network.send(one.address.peer, Send(to, lane, Close(number)))


def run(clock: Clock) -> None:
    while clock.step():
        pass


def test_a_lane_keeps_its_order_and_lanes_do_not_keep_each_other_s() -> None:
    mixed = 0
    for seed in range(20):
        clock, network, (a, b) = build(Weather(bulk_factor=5.0), seed)
        say(network, a, b.address, range(10), Lane.LIVE)
        say(network, a, b.address, range(100, 110), Lane.BULK)
        run(clock)
        assert [n for n in b.heard if n < 100] == list(range(10))
        assert [n for n in b.heard if n >= 100] == list(range(100, 110))
        mixed += b.heard != sorted(b.heard)
    assert mixed


def test_the_two_links_of_a_pair_are_not_ordered_to_each_other() -> None:
    """Each side sends on the link it dialled: what crosses is not one stream."""
    clock, network, (a, b) = build(Weather())
    say(network, a, b.address, [1], Lane.LIVE)
    say(network, b, a.address, [2], Lane.LIVE)
    run(clock)
    assert (a.heard, b.heard) == ([2], [1])
    assert (a.links, b.links) == (["+b"], ["+a"])


def test_a_broken_link_loses_a_tail_and_both_sides_hear_it_once() -> None:
    lost = 0
    for seed in range(20):
        clock, network, (a, b) = build(Weather(), seed)
        say(network, a, b.address, [0], Lane.LIVE)
        say(network, b, a.address, [0], Lane.LIVE)
        run(clock)
        say(network, a, b.address, range(1, 10), Lane.LIVE)
        network.drop("b", "a")
        run(clock)
        assert b.heard == list(range(len(b.heard)))
        assert (a.links, b.links) == (["+b", "-b"], ["+a", "-a"])
        lost += 10 - len(b.heard)
    assert lost


def test_a_dial_to_a_dead_or_restarted_process_fails() -> None:
    clock, network, (a, b) = build(Weather())
    b.alive = False
    network.died(b.address.peer)
    network.join(Recorder("b", boot=1))
    say(network, a, b.address, [1], Lane.LIVE)
    run(clock)
    assert (a.links, b.heard) == (["-b"], [])


def test_parted_processes_cannot_link_whoever_dials() -> None:
    clock, network, (a, b) = build(Weather())
    network.part("a", "b", 0.0)
    say(network, a, b.address, [1], Lane.LIVE)
    say(network, b, a.address, [1], Lane.LIVE)
    run(clock)
    assert (a.links, b.links, a.heard, b.heard) == (["-b"], ["-a"], [], [])


def test_repeats_come_on_the_same_link_and_stop_with_it() -> None:
    clock, network, (a, b) = build(Weather(duplicate_chance=1.0))
    say(network, a, b.address, range(5), Lane.LIVE)
    run(clock)
    assert sorted(b.heard) == sorted([*range(5), *range(5)])
    say(network, a, b.address, range(5, 10), Lane.LIVE)
    network.drop("a", "b")
    run(clock)
    assert network.repeated == 5


def test_what_is_sent_to_a_peer_that_can_only_be_answered_is_lost_without_a_link() -> None:
    clock, network, (a, _) = build(Weather())
    say(network, a, reply_address("gateway/1/0"), [1], Lane.LIVE)
    run(clock)
    assert network.lost == 1
