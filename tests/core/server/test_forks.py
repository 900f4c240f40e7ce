"""A session forks from another one (R15): its hops copy the parent's KV, or run what they could not copy."""

from __future__ import annotations

import pytest
from support.core.gateway import Swarm, add_gateway, swarm_of
from support.core.network import Network
from support.core.server import Options, Server, expected

from modelswarm.protocol.identity import Epoch, ForkSource
from modelswarm.protocol.messages import Create, Fence, FenceAck, Lane, Refusal, Turn
from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.sessions.session import PARK_SECONDS
from modelswarm_serving.core.kv.forks import FORK_SECONDS
from modelswarm_serving.model.base import KvCopy

PROMPT = [5 + at for at in range(40)]
N = len(PROMPT) - 1  # positions of KV that a fork with the same prompt copies


def rows(swarm: Swarm) -> list[int]:
    return [server.core.stats.rows for server in swarm.servers.values()]


def with_parent(**options: int) -> Swarm:
    """Return a swarm of two servers on which session `a` has answered the prompt."""
    swarm = swarm_of((0, 2), (2, 4), **options)  # type: ignore[arg-type]
    swarm.gateway.start("a", PROMPT, 3)
    assert swarm.gateway.tokens("a") == expected(PROMPT, 3)
    return swarm


def begin_fork(swarm: Swarm, log: list[int], new: int = 3) -> None:
    """Begin a fork up to its first copy."""
    swarm.gateway.begin("b", log, new, parent="a")
    swarm.run(until=lambda: any(copies_of(server) for server in swarm.servers.values()))


def copies_of(server: Server) -> list[KvCopy]:
    return [task for task in server.out if isinstance(task, KvCopy)]


def test_fork_with_the_same_prompt_runs_its_last_row_only() -> None:
    swarm = with_parent()
    before = rows(swarm)
    swarm.gateway.start("b", PROMPT, 3, parent="a")
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    assert [now - then for then, now in zip(before, rows(swarm), strict=True)] == [3, 3]
    assert swarm.gateway.view("b").route == swarm.gateway.view("a").route


def test_fork_copies_up_to_where_the_logs_part() -> None:
    swarm = with_parent()
    before = rows(swarm)
    log = [*PROMPT[:30], 1, 2, 3]
    swarm.gateway.start("b", log, 2, parent="a")
    assert swarm.gateway.tokens("b") == expected(log, 2)
    assert [now - then for then, now in zip(before, rows(swarm), strict=True)] == [4, 4]


def test_fork_of_generated_tokens_copies_them() -> None:
    swarm = with_parent()
    before = rows(swarm)
    log = [*PROMPT, *expected(PROMPT, 3), 9]
    swarm.gateway.start("b", log, 2, parent="a")
    assert swarm.gateway.tokens("b") == expected(log, 2)
    # The parent's last token was never run.
    assert [now - then for then, now in zip(before, rows(swarm), strict=True)] == [3, 3]


def test_pages_of_parent_and_fork_are_apart() -> None:
    swarm = with_parent()
    swarm.gateway.start("b", PROMPT[:20], 3, parent="a")
    swarm.gateway.effects.clear()
    longer = [*PROMPT, *expected(PROMPT, 3), 7]
    swarm.gateway.start("a", longer, 3)
    assert swarm.gateway.tokens("a") == expected(longer, 3)
    swarm.core.close_session("a", swarm.now)
    swarm.run()
    swarm.gateway.effects.clear()
    other = [*PROMPT[:20], 8]
    swarm.gateway.start("b", other, 3)
    assert swarm.gateway.tokens("b") == expected(other, 3)
    swarm.core.close_session("b", swarm.now)
    swarm.run()
    for server in swarm.servers.values():
        assert server.core.stats.free_pages == server.core.stats.total_pages


@pytest.mark.parametrize("parent", ["a", "gone", "b"])
def test_fork_without_its_parent_runs_its_prompt(parent: str) -> None:
    swarm = with_parent()
    if parent == "a":
        swarm.core.close_session("a", swarm.now)
    before = rows(swarm)
    swarm.gateway.start("b", PROMPT, 2, parent=parent)
    assert swarm.gateway.tokens("b") == expected(PROMPT, 2)
    assert [now - then for then, now in zip(before, rows(swarm), strict=True)] == [N + 2, N + 2]


def test_parent_in_another_epoch_is_not_copied() -> None:
    """The parent is rewound while the create of the fork is on its way again: the gateway named an older epoch."""
    swarm = with_parent()
    gateway, (head, tail) = swarm.gateway, list(swarm.servers.values())
    swarm.held |= {(gateway.peer, head.peer, Lane.LIVE), (gateway.peer, tail.peer, Lane.LIVE)}
    gateway.begin("b", PROMPT, 2, parent="a")
    swarm.collect()
    creates = {
        server.peer: swarm.lanes.pop((gateway.peer, server.peer, Lane.LIVE))
        for server in (head, tail)
    }
    swarm.held.clear()
    rewound = [*PROMPT[:10], 3, 4, 5, *PROMPT[13:], 6]
    gateway.start("a", rewound, 3)
    for peer, items in creates.items():
        for item in items:
            swarm.put(gateway.peer, peer, item)
    before = rows(swarm)
    swarm.run()
    assert gateway.tokens("b") == expected(PROMPT, 2)
    assert [now - then for then, now in zip(before, rows(swarm), strict=True)] == [N + 2, N + 2]


def test_fork_keeps_what_it_copied_before_its_parent_was_fenced() -> None:
    swarm = with_parent(fork_step_bytes=16 * 5)  # five positions of two blocks
    begin_fork(swarm, PROMPT)
    swarm.gateway.begin("a", [*PROMPT[:7], 1], 2)
    before = rows(swarm)
    swarm.run()
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    assert swarm.gateway.tokens("a")[-2:] == expected([*PROMPT[:7], 1], 2)
    acks = [ack for ack in swarm.sent_to(swarm.gateway.peer, FenceAck) if ack.kv % 5 == 0]
    assert any(0 < ack.kv < N for ack in acks)
    assert max(rows(swarm)) - max(before) < N + 6


def test_fork_of_a_parent_closed_meanwhile_ends_with_a_part() -> None:
    swarm = with_parent(fork_step_bytes=16 * 5)
    begin_fork(swarm, PROMPT)
    swarm.core.close_session("a", swarm.now)
    swarm.run()
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)


def test_copy_ends_when_its_time_is_up() -> None:
    swarm = with_parent(fork_step_bytes=16 * 5)
    begin_fork(swarm, PROMPT)
    swarm.now += FORK_SECONDS
    swarm.run()
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    kv = [ack.kv for ack in swarm.sent_to(swarm.gateway.peer, FenceAck)[-2:]]
    assert max(kv) == 5


def test_copy_that_fails_leaves_the_rest_to_the_prompt() -> None:
    swarm = with_parent(fork_step_bytes=16 * 5)
    head = next(iter(swarm.servers.values()))
    begin_fork(swarm, PROMPT)
    for server in swarm.servers.values():
        if copies_of(server):
            server.out = ()
            server.core.fail_step("the copy raised", swarm.now)
    swarm.run()
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    assert head.core.stats.sessions == 2


def test_fork_is_closed_during_its_copy() -> None:
    swarm = with_parent(fork_step_bytes=16 * 5)
    begin_fork(swarm, PROMPT)
    swarm.core.close_session("b", swarm.now)
    swarm.core.close_session("a", swarm.now)
    swarm.run()
    for server in swarm.servers.values():
        assert server.core.stats.free_pages == server.core.stats.total_pages


def test_fork_without_room_beside_its_parent_runs_elsewhere() -> None:
    """The pages of the parent's servers suffice for the parent, and those of their replicas for the fork."""
    swarm = swarm_of((0, 2), (2, 4), total_pages=20)
    swarm.gateway.start("a", PROMPT, 12)
    swarm.serve(0, 2, total_pages=20)
    swarm.serve(2, 4, total_pages=20)
    swarm.gateway.start("b", PROMPT, 12, parent="a")
    assert swarm.gateway.tokens("b") == expected(PROMPT, 12)
    assert not set(swarm.gateway.route("a")) & set(swarm.gateway.route("b"))


def test_fork_without_any_room_is_refused() -> None:
    swarm = swarm_of((0, 2), (2, 4), total_pages=20)
    swarm.gateway.start("a", PROMPT, 12)
    swarm.gateway.start("b", PROMPT, 12, parent="a")
    assert isinstance(swarm.gateway.troubles("b")[-1], Refused)


@pytest.mark.parametrize("lost", [0, 1])
def test_fork_recovers_alone_by_replay(lost: int) -> None:
    """The rows of the parent's replay log were copied too, so a lost tail is rebuilt without a row of the head."""
    swarm = with_parent()
    swarm.gateway.begin("b", PROMPT, 12, ahead=4, parent="a")
    swarm.run()
    spare = swarm.serve(*((0, 2), (2, 4))[lost])
    head = swarm.servers[swarm.gateway.route("b")[0]]
    before = head.core.stats.rows
    swarm.kill(swarm.gateway.route("b")[lost])
    swarm.gateway.read("b")
    swarm.run()
    assert swarm.gateway.tokens("b") == expected(PROMPT, 12)
    assert spare.peer in swarm.gateway.route("b")
    if lost == 1:
        assert head.core.stats.rows - before <= 12


def test_parent_of_another_gateway_is_not_copied() -> None:
    network = Network(options=Options())
    server = network.serve(0, 4)
    one, other = add_gateway(network, 1), add_gateway(network, 2)
    one.start("a", PROMPT, 2)
    (granted,) = network.sent_to(one.peer, FenceAck)
    for gateway, copied in ((other, 0), (one, 20)):
        source = ForkSource(granted.server_handle, granted.epoch, 20)
        create = Create(f"fork at {gateway.peer}", 0, 4, parent=source)
        network.put(gateway.peer, server.peer, Fence(0, 7, Epoch(9, 9), 0, 0, create, Turn(30, 31)))
        network.run()
        assert network.sent_to(gateway.peer, FenceAck)[-1].kv == copied


def test_creator_is_told_that_its_hop_was_taken_during_the_copy() -> None:
    """R20: an unanswered Fence would look like a lost server, and the session would run elsewhere too."""
    network = Network(options=Options(fork_step_bytes=1))
    server = network.serve(0, 4)
    one, other = add_gateway(network, 1), add_gateway(network, 2)
    one.start("a", PROMPT, 2)
    (granted,) = network.sent_to(one.peer, FenceAck)
    source = ForkSource(granted.server_handle, granted.epoch, 20)
    for gateway, epoch, parent in ((one, Epoch(9, 1), source), (other, Epoch(9, 2), None)):
        create = Create("b", 0, 4, parent=parent)
        fence = Fence(0, 7, epoch, 0, 0, create, Turn(30, 31))
        network.put(gateway.peer, server.peer, fence)
    network.run()
    told = network.sent_to(one.peer, FenceAck)[-1]
    assert (told.handle, told.epoch, told.refusal) == (7, Epoch(9, 1), Refusal.STALE_EPOCH)
    assert told.owner_epoch == Epoch(9, 2)


@pytest.mark.parametrize("pages", [44, 52])
def test_fork_has_one_hop_where_its_parent_has_two(pages: int) -> None:
    """A loss has left the parent with two hops on one server, which has no room for two more."""
    swarm = swarm_of((0, 2), (2, 4), total_pages=pages)
    log = PROMPT
    swarm.gateway.start("a", log, 3)
    swarm.serve(0, 4, total_pages=pages)
    for peer in list(swarm.servers)[:2]:
        swarm.kill(peer)
        log = [*log, *expected(log, 3), 1]
        swarm.gateway.start("a", log, 3)
    assert len(swarm.gateway.route("a")) == 2
    swarm.gateway.start("b", PROMPT, 3, parent="a")
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    assert len(swarm.gateway.route("b")) == 1


def test_end_of_the_parents_turn_ends_no_copy() -> None:
    """A Fence of its hops a second later would leave the rest of the prompt to the fork."""
    swarm = with_parent(fork_step_bytes=16 * 5)
    swarm.now += PARK_SECONDS - FORK_SECONDS / 4
    before = rows(swarm)
    begin_fork(swarm, PROMPT)
    swarm.now += FORK_SECONDS / 2
    swarm.core.tick(swarm.now)
    swarm.run()
    assert swarm.gateway.tokens("b") == expected(PROMPT, 3)
    assert [now - then for then, now in zip(before, rows(swarm), strict=True)] == [3, 3]
    swarm.wait(PARK_SECONDS + 0.1)
    assert swarm.gateway.view("a").epoch > swarm.gateway.view("a").newest_run_epoch, "it is fenced"
