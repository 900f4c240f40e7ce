"""A gateway dies while it fences: the logs and the KV that may be used for the takeover (R20, takeover)."""

from __future__ import annotations

import itertools
import random

import pytest
from support.core.gateway import LEASE, Gateway, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import expected

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Fence, Input, Item, StartEpoch

PROMPT = [random.Random(at).randrange(97) for at in range(12)]
COMMON = 5  # entries with which both prompts begin
OTHER = [*PROMPT[:COMMON], *(random.Random(at).randrange(97) for at in range(50, 70))]
NEW = 40
WHOLE = [*PROMPT, *expected(PROMPT, NEW)]
OTHER_WHOLE = [*OTHER, *expected(OTHER, NEW)]
SESSION = "named"
SUBSETS = [kept for size in range(4) for kept in itertools.combinations(range(3), size)]


def start_partial_turn(made: Network) -> Gateway:
    """Return a gateway whose session has three hops and some of its tokens, and waits for its reader."""
    for first, last in ((0, 1), (1, 3), (3, 4)):
        made.serve(first, last)
    gateway = add_gateway(made, 1)
    gateway.start(SESSION, PROMPT, NEW, ahead=8, above=0)
    assert 0 < len(gateway.tokens(SESSION)) < NEW
    return gateway


def kill_after_sending(
    made: Network, gateway: Gateway, reached: dict[type[Item], set[PeerId]]
) -> None:
    """Kill the gateway. Of its unsent messages, only those of the given kinds reach the given servers."""
    made.collect()
    for (sender, to, _), lane in made.lanes.items():
        if sender == gateway.peer:
            kept = [item for item in lane if to in reached.get(type(item), ())]
            lane.clear()
            lane.extend(kept)
    for name in made.servers:
        made.deliver_all(gateway.peer, name)
    made.kill(gateway.peer)


def kill_while_fencing(made: Network, reached: tuple[int, ...]) -> list[int]:
    """Kill a stalled gateway when only some hops have its Fences. Return the log that its client has read."""
    first = start_partial_turn(made)
    read = [*PROMPT, *first.tokens(SESSION)]
    names = list(made.servers)
    made.now += LEASE * 0.6
    first.core.tick(made.now)
    kill_after_sending(made, first, {Fence: {names[number] for number in reached}})
    made.wait(LEASE + 0.2)
    return read


def complete_takeover(made: Network, gateway: Gateway, prompt: list[int]) -> list[int]:
    """Take the session over, run a right turn from `prompt`, and close it without leftovers. Return the log found."""
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
def test_takeover_finds_all_read_tokens_after_partial_fences(reached: tuple[int, ...]) -> None:
    made = takeover_network()
    read = kill_while_fencing(made, reached)
    log = complete_takeover(made, add_gateway(made, 2), read)
    assert log[: len(read)] == read


@pytest.mark.parametrize("fenced", SUBSETS)
@pytest.mark.parametrize(
    "kinds", [(Fence,), (Fence, StartEpoch), (Fence, Input), (Fence, StartEpoch, Input)]
)
def test_takeover_after_partial_rewind_gives_expected_tokens(
    kinds: tuple[type[Item], ...], fenced: tuple[int, ...]
) -> None:
    """The client has read nothing of that turn. The log may be of either turn, and no KV may be of the other one."""
    made = takeover_network()
    first = start_partial_turn(made)
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
    kill_after_sending(made, first, reached)
    made.wait(LEASE + 0.2)
    log = complete_takeover(made, add_gateway(made, 2), OTHER)
    assert len(log) >= COMMON
    assert log in (WHOLE[: len(log)], OTHER_WHOLE[: len(log)])


@pytest.mark.parametrize("reached", SUBSETS)
def test_second_takeover_succeeds_after_first_one_dies(reached: tuple[int, ...]) -> None:
    made = takeover_network()
    read = kill_while_fencing(made, (1,))  # only a hop without a log has the Fence
    names = list(made.servers)
    second = add_gateway(made, 2)
    where = second.find(SESSION)
    second.adopt(where)
    second.begin(SESSION, read, NEW)
    kill_after_sending(made, second, {Fence: {names[number] for number in reached}})
    made.wait(LEASE + 0.2)
    log = complete_takeover(made, add_gateway(made, 3), read)
    assert log[: len(read)] == read


def test_outdated_log_of_disconnected_tail_is_not_used() -> None:
    """The tail lost its link, and the session continued over another one, which is lost with the gateway."""
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
    read = [*PROMPT, *first.tokens(SESSION)]
    made.now += LEASE * 0.6
    first.core.tick(made.now)  # the head has a newer epoch than the one that ran last
    kill_after_sending(made, first, {Fence: {names[0]}})
    made.kill(new)
    made.wait(LEASE + 0.2)
    second = add_gateway(made, 2)
    where = second.find(SESSION)
    assert {holder.peer for holder in where.log_holders} == {names[0]}
    log = complete_takeover(made, second, read)
    assert log == read[: len(log)]
    assert len(read) - len(log) <= 1, "a head does not get the token that waits for the reader"
