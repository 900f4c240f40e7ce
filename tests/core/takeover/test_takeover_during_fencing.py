"""A gateway dies while it fences: which of the logs that are left may be taken, and what may be kept with it (R20)."""

from __future__ import annotations

import itertools
import random

import pytest
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import expected

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence, Input, Item, StartEpoch
from modelswarm_gateway.core.interface.effects import OwnershipLost

PROMPT = [random.Random(at).randrange(97) for at in range(12)]
OTHER = [*PROMPT[:5], *(random.Random(at).randrange(97) for at in range(50, 70))]
NEW = 40
WHOLE = [*PROMPT, *expected(PROMPT, NEW)]
SESSION = "named"
SUBSETS = [kept for size in range(4) for kept in itertools.combinations(range(3), size)]


def half_way(made: Network) -> Gateway:
    """Three hops; the session has generated some of its tokens, and waits for its reader."""
    for first, last in ((0, 1), (1, 3), (3, 4)):
        made.serve(first, last)
    gateway = add_gateway(made, 1)
    gateway.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    assert 0 < len(gateway.tokens(SESSION)) < NEW
    return gateway


def dies_saying(made: Network, gateway: Gateway, reached: dict[type[Item], set[PeerId]]) -> None:
    """Of what it says now, only these kinds of messages still come to these servers."""
    made.collect()
    for (sender, to, _), lane in made.lanes.items():
        if sender == gateway.peer:
            kept = [item for item in lane if to in reached.get(type(item), ())]
            lane.clear()
            lane.extend(kept)
    for name in made.servers:
        made.deliver_all(gateway.peer, name)
    made.kill(gateway.peer)


def dies_in_its_fences(made: Network, reached: tuple[int, ...]) -> list[int]:
    """A gateway half way was late, fences, and dies when so many hops have heard; what the client has read."""
    first = half_way(made)
    told = [*PROMPT, *first.tokens(SESSION)]
    names = list(made.servers)
    made.now += LEASE * 0.6
    first.core.tick(made.now)
    dies_saying(made, first, {Fence: {names[number] for number in reached}})
    made.wait(LEASE + 0.2)
    return told


def goes_on(made: Network, gateway: Gateway, prompt: list[int]) -> list[int]:
    """The log that was found; then a turn from `prompt` is right to the last token, and nothing is left over."""
    where = gateway.find(SESSION)
    assert (where.is_owner_alive, where.takeover_wait) == (False, 0.0)
    log = gateway.adopt(where)
    gateway.start(SESSION, prompt, NEW)
    assert gateway.tokens(SESSION) == expected(prompt, NEW)
    gateway.core.close_session(SESSION, made.now)
    made.run()
    made.wait(2 * LEASE + 1)
    assert [server.core.stats.sessions for server in made.servers.values()] == [0] * len(
        made.servers
    )
    return log


@pytest.mark.parametrize("reached", SUBSETS)
def test_whichever_hops_its_last_fences_reached_all_that_was_read_is_found(
    reached: tuple[int, ...],
) -> None:
    made = takeover_network()
    told = dies_in_its_fences(made, reached)
    log = goes_on(made, add_gateway(made, 2), told)
    assert log[: len(told)] == told


@pytest.mark.parametrize("fenced", SUBSETS)
@pytest.mark.parametrize(
    "kinds", [(Fence,), (Fence, StartEpoch), (Fence, Input), (Fence, StartEpoch, Input)]
)
def test_whatever_reached_its_hops_of_a_turn_that_goes_back_the_adopter_is_right(
    kinds: tuple[type[Item], ...], fenced: tuple[int, ...]
) -> None:
    """The client has read nothing of that turn: the log may be of either, and no KV may be of the other."""
    made = takeover_network()
    first = half_way(made)
    names = list(made.servers)
    first.core.cancel_turn(SESSION, made.now)
    made.run()
    first.begin(SESSION, OTHER, NEW, ahead=8)
    if kinds != (Fence,):
        made.collect()
        made.run(
            until=lambda: any(
                isinstance(i, StartEpoch) for lane in made.lanes.values() for i in lane
            )
        )
        reached = {kind: {names[number] for number in fenced} for kind in kinds}
    else:
        reached = {Fence: {names[number] for number in fenced}}
    dies_saying(made, first, reached)
    made.wait(LEASE + 0.2)
    goes_on(made, add_gateway(made, 2), OTHER)


@pytest.mark.parametrize("reached", SUBSETS)
def test_an_adopter_that_dies_in_the_middle_leaves_enough_for_the_next_one(
    reached: tuple[int, ...],
) -> None:
    made = takeover_network()
    told = dies_in_its_fences(made, (1,))  # only a hop without a log
    names = list(made.servers)
    second = add_gateway(made, 2)
    where = second.find(SESSION)
    second.adopt(where)
    second.begin(SESSION, told, NEW)
    dies_saying(made, second, {Fence: {names[number] for number in reached}})
    made.wait(LEASE + 0.2)
    log = goes_on(made, add_gateway(made, 3), told)
    assert log[: len(told)] == told


def test_a_log_that_missed_what_ran_later_is_never_taken() -> None:
    """The tail was cut off, and the session went on over another one, which is gone with the gateway."""
    made = takeover_network()
    names = [made.serve(first, first + 2).peer for first in (0, 2, 2)]
    first = add_gateway(made, 1)
    first.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    view = first.core.find_view(SESSION)
    assert view is not None
    old = view.route[-1].peer
    new = next(name for name in names[1:] if name != old)
    made.cut_link(first.peer, old)
    first.read(SESSION, len(PROMPT) + 12)
    told = [*PROMPT, *first.tokens(SESSION)]
    made.now += LEASE * 0.6
    first.core.tick(made.now)  # the head has a newer epoch than the one that ran last
    dies_saying(made, first, {Fence: {names[0]}})
    made.kill(new)
    made.wait(LEASE + 0.2)
    second = add_gateway(made, 2)
    where = second.find(SESSION)
    assert {holder.peer for holder in where.log_holders} == {names[0]}
    log = goes_on(made, second, told)
    assert log == told[: len(log)]
    assert len(told) - len(log) <= 1, "a head is not told the token that waits for the reader"


@pytest.mark.parametrize("seed", range(30))
def test_an_owner_that_wakes_while_it_is_adopted_goes_on_or_lets_go_but_never_both(
    seed: int,
) -> None:
    made = takeover_network(seed)
    first = half_way(made)
    told = [*PROMPT, *first.tokens(SESSION)]
    first.frozen = True
    made.wait(LEASE + 0.2)
    second = add_gateway(made, 2)
    where = second.find(SESSION)
    second.adopt(where)
    second.begin(SESSION, told, NEW)
    steps = random.Random(seed).randrange(40)

    def struck() -> bool:
        nonlocal steps
        steps -= 1
        return steps < 0

    made.run(until=struck)
    first.frozen = False
    first.core.tick(made.now)
    first.read(SESSION, len(WHOLE))
    made.wait(1.0)
    left = [g for g in (first, second) if g.all(OwnershipLost)]
    assert len(left) == 1
    if left == [first]:
        assert second.tokens(SESSION) == expected(told, NEW)
    else:
        assert [*PROMPT, *first.tokens(SESSION)] == WHOLE
