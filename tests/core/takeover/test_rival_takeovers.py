"""Two gateways take one session over at the same time, in the worst orders of messages (R20, ownership).

Real cores on the in-memory network. The third gateway has the higher epochs of the same counter.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.takeover.test_takeover import NEW, PROMPT, SESSION, WHOLE, start_partial_turn, swarm
from support.core.gateway import LEASE, Gateway, add_gateway
from support.core.network import Network
from support.core.server import MODEL, Server, expected

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Input, Lane, Sampling, StartEpoch
from modelswarm_gateway.core.interface.effects import OwnershipLost
from modelswarm_gateway.core.interface.session_search import FetchedLog, SessionLocation
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.interface.turn import TurnRequest

RANDOM = Sampling(temperature=1.0, seed=7)
# All Inputs go on the bulk lane.
BULK_INPUTS = GatewaySettings(lease_seconds=LEASE, max_live_input_tokens=0)


@dataclass
class Rivals:
    """A session whose gateway was killed, and two gateways that have found it and fetched its log."""

    network: Network
    head: Server
    tail: Server
    low: Gateway
    high: Gateway
    found: dict[PeerId, tuple[SessionLocation, FetchedLog]]

    def take_over(self, gateway: Gateway) -> None:
        where, log = self.found[gateway.peer]
        gateway.core.take_over(where, MODEL, log, self.network.now)

    def begin(self, gateway: Gateway, prompt: list[int], sampling: Sampling) -> None:
        request = TurnRequest(tuple(prompt), NEW, sampling, credit_ahead=1 << 40)
        gateway.core.start_turn(SESSION, request, self.network.now)
        self.network.collect()

    def hold(
        self, gateway: Gateway, *servers: Server, lanes: tuple[Lane, ...] = (Lane.LIVE,)
    ) -> None:
        """Hold what the gateway sends to these servers."""
        self.network.held |= {(gateway.peer, each.peer, lane) for each in servers for lane in lanes}

    def hold_answers(self, gateway: Gateway, server: Server) -> None:
        self.network.held.add((server.peer, gateway.peer, Lane.LIVE))

    def release(self) -> None:
        self.network.held.clear()
        self.network.run()

    def run_until_start(self, gateway: Gateway) -> None:
        """Run until the gateway has sent its StartEpochs, of which none is delivered."""
        lanes = [(gateway.peer, each.peer, Lane.LIVE) for each in (self.head, self.tail)]
        self.network.run(
            until=lambda: all(
                any(isinstance(item, StartEpoch) for item in self.network.lanes.get(lane, ()))
                for lane in lanes
            )
        )

    @property
    def log(self) -> list[int]:
        return list(self.found[self.low.peer][1].tokens)

    @property
    def losers(self) -> list[PeerId]:
        return [each.peer for each in (self.low, self.high) if each.all(OwnershipLost)]

    @property
    def owners(self) -> list[PeerId]:
        return [hop.gateway for each in (self.head, self.tail) for hop in each.core._fencing.hops]


def start_rivals(settings: GatewaySettings | None = None, *, is_tail_stuck: bool = False) -> Rivals:
    network = swarm()
    head, tail = network.servers.values()
    first = start_partial_turn(network)
    if is_tail_stuck:
        tail.stuck = True
        first.read(SESSION, len(WHOLE))
        assert tail.out
    low, high = add_gateway(network, 2, settings), add_gateway(network, 3, settings)
    network.kill(first.peer)
    network.wait(LEASE + 0.2)
    found = {}
    for gateway in (low, high):
        where = gateway.find(SESSION)
        found[gateway.peer] = where, gateway.fetch(where)
    return Rivals(network, head, tail, low, high, found)


def test_hop_that_comes_back_runs_the_turn_of_its_owner() -> None:
    """The lower one has started the head. The higher one takes the tail with its own turn, and later lets go."""
    rivals = start_rivals()
    network, low, high = rivals.network, rivals.low, rivals.high
    rivals.take_over(low)
    network.run()
    rivals.begin(low, rivals.log, RANDOM)
    rivals.run_until_start(low)
    rivals.hold(low, rivals.tail)
    network.deliver_all(low.peer, rivals.head.peer)
    rivals.hold(high, rivals.head)
    rivals.take_over(high)
    rivals.begin(high, rivals.log, Sampling())
    network.deliver_all(high.peer, rivals.tail.peer)
    assert rivals.owners == [low.peer, high.peer]
    rivals.release()
    network.wait(3.0)
    assert rivals.losers == [high.peer]
    assert low.tokens(SESSION) == expected(rivals.log, NEW, sampling=RANDOM)
    assert rivals.owners == [low.peer] * 2


def test_prompt_that_never_ran_is_dropped_when_a_hop_is_taken() -> None:
    """The Input of another prompt overtakes its StartEpoch, and the hops change their owner between the two."""
    rivals = start_rivals(BULK_INPUTS)
    network, low, high = rivals.network, rivals.low, rivals.high
    rivals.take_over(low)
    network.run()
    other = [*PROMPT[:5], *(token + 1 if token < 96 else 0 for token in rivals.log[5:])]
    rivals.begin(low, other, Sampling())
    rivals.run_until_start(low)
    rivals.hold(low, rivals.head, rivals.tail)
    assert any(
        isinstance(i, Input)
        for key, lane in network.lanes.items()
        if key[2] is Lane.BULK
        for i in lane
    )
    network.deliver_all(low.peer)
    rivals.take_over(high)
    rivals.begin(high, rivals.log, RANDOM)
    network.run()
    assert rivals.owners == [high.peer] * 2
    rivals.release()
    network.wait(3.0)
    assert rivals.losers == [low.peer]
    assert high.tokens(SESSION) == expected(rivals.log, NEW, sampling=RANDOM)


def test_gateway_with_a_pending_fence_is_told_of_its_taken_hop() -> None:
    """A step is out with the tail while both fence it: the first answer is still due when the hop is taken."""
    rivals = start_rivals(is_tail_stuck=True)
    network, low, high = rivals.network, rivals.low, rivals.high
    for gateway in (low, high):
        rivals.take_over(gateway)
        rivals.begin(gateway, rivals.log, Sampling())
        network.run()
    assert rivals.losers == [low.peer], "no deadline is needed"
    rivals.tail.stuck = False
    network.run()
    assert high.tokens(SESSION) == expected(rivals.log, NEW)
    assert rivals.owners == [high.peer] * 2


def test_running_gateway_wins_before_the_other_hears_of_a_grant() -> None:
    """The lower one has started the tail. The higher one hears of that before it hears that it has the head."""
    rivals = start_rivals()
    network, low, high = rivals.network, rivals.low, rivals.high
    rivals.take_over(low)
    network.run()
    rivals.begin(low, rivals.log, RANDOM)
    rivals.run_until_start(low)
    rivals.hold(low, rivals.head)
    network.deliver_all(low.peer, rivals.tail.peer)
    rivals.hold_answers(high, rivals.head)
    rivals.take_over(high)
    rivals.begin(high, rivals.log, Sampling())
    network.run()
    assert rivals.owners == [high.peer, low.peer]
    rivals.release()
    network.wait(3.0)
    assert rivals.losers == [high.peer]
    assert low.tokens(SESSION) == expected(rivals.log, NEW, sampling=RANDOM)
    assert rivals.owners == [low.peer] * 2
