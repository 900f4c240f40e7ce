"""A session goes on in the numerics class that its blocks ran in; a change is reported and costs no token."""

from __future__ import annotations

import pytest
from support.core.gateway import LEASE, Gateway, Swarm, add_gateway, takeover_network
from support.core.network import Network
from support.core.server import Server, expected

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Heartbeat
from modelswarm_gateway.core.interface.effects import MigrationEnded, NumericsChanged
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.core.servers.numerics import BlockClass, joined_classes, other_classes

PROMPT = [(7 * at) % 97 for at in range(20)]
A, B = "cpu-amd-avx512_bf16/torch-2.15.0/float32", "cpu-intel-avx2/torch-2.15.0/float32"


def of_class(numerics: str) -> dict[str, object]:
    return {"numerics": numerics}


def start_on(numerics: str, *others: str, new: int = 20) -> tuple[Swarm, Server, list[Server]]:
    """Return a swarm whose session `s` waits for its reader, its tail of that class, and tails that came later."""
    swarm = Swarm()
    swarm.serve(0, 2, of_class(A))
    tail = swarm.serve(2, 4, of_class(numerics))
    swarm.gateway.start("s", PROMPT, new, ahead=4)
    return swarm, tail, [swarm.serve(2, 4, of_class(other)) for other in others]


def changes(gateway: Gateway) -> list[tuple[PeerId, str, str]]:
    return [(each.peer, each.before, each.now) for each in gateway.all(NumericsChanged)]


def finish(swarm: Swarm, new: int = 20) -> None:
    swarm.gateway.read("s")
    assert swarm.gateway.tokens("s") == expected(PROMPT, new)


def test_killed_server_is_replaced_in_its_class() -> None:
    swarm, tail, others = start_on(A, B, B, A, B)
    swarm.kill(tail.peer)
    assert swarm.route("s")[-1] is others[2]
    finish(swarm)
    assert not changes(swarm.gateway)


def test_other_class_replaces_the_last_of_its_class() -> None:
    swarm, tail, [other] = start_on(A, B)
    swarm.kill(tail.peer)
    assert swarm.route("s")[-1] is other
    finish(swarm)
    assert changes(swarm.gateway) == [(other.peer, A, B)]


def test_class_that_ran_last_is_preferred_after_a_change() -> None:
    swarm, tail, [first] = start_on(A, B)
    swarm.kill(tail.peer)
    others = [swarm.serve(2, 4, of_class(each)) for each in (A, A, B)]
    swarm.kill(first.peer)
    assert swarm.route("s")[-1] is others[2]
    assert len(changes(swarm.gateway)) == 1


def test_healthy_server_of_other_class_precedes_a_last_resort() -> None:
    swarm, tail, [same, other] = start_on(A, A, B)
    swarm.core.migrations.drain(same.peer, "drain", swarm.now)
    swarm.kill(tail.peer)
    assert swarm.route("s")[-1] is other


def test_free_server_of_other_class_comes_before_a_full_one() -> None:
    """A wait for KV is longer than any preference."""
    swarm, tail, [full, other] = start_on(A, A, B)
    swarm.core.receive(full.peer, Heartbeat(total_pages=1024), swarm.now)
    swarm.kill(tail.peer)
    assert swarm.route("s")[-1] is other


def test_blocks_that_stay_do_not_count() -> None:
    """A server that also holds blocks of a hop that stays, of another class, is as good as any of its class."""
    swarm = Swarm()
    swarm.serve(0, 2, of_class(B))
    tail = swarm.serve(2, 4, of_class(A))
    swarm.gateway.start("s", PROMPT, 20, ahead=4)
    busy = swarm.serve(2, 4, of_class(A))
    whole = swarm.serve(0, 4, of_class(A))
    heartbeat = Heartbeat(running=20, free_pages=1000, total_pages=1024)
    swarm.core.receive(busy.peer, heartbeat, swarm.now)
    swarm.kill(tail.peer)
    assert swarm.route("s")[-1] is whole
    finish(swarm)
    assert not changes(swarm.gateway)


def test_drained_server_is_replaced_in_its_class() -> None:
    swarm, tail, others = start_on(A, B, A, B, new=60)
    swarm.core.migrations.drain(tail.peer, "drain", swarm.now)
    swarm.wait(2.0)
    assert swarm.route("s")[-1] is others[1]
    assert [each.outcome for each in swarm.gateway.all(MigrationEnded)] == ["migrated"]
    finish(swarm, 60)
    assert not changes(swarm.gateway)


def test_drain_to_another_class_is_reported() -> None:
    swarm, tail, [other] = start_on(A, B, new=60)
    swarm.core.migrations.drain(tail.peer, "drain", swarm.now)
    swarm.wait(2.0)
    finish(swarm, 60)
    assert changes(swarm.gateway) == [(other.peer, A, B)]


def test_parked_session_goes_on_in_its_class() -> None:
    swarm, tail, others = start_on(A, B, A, new=4)
    swarm.gateway.read("s")
    swarm.kill(tail.peer)
    log = [*PROMPT, *swarm.gateway.tokens("s"), 5]
    swarm.gateway.clear_and_start("s", log, 6)
    assert swarm.route("s")[-1] is others[1]
    assert swarm.gateway.tokens("s") == expected(log, 6)
    assert not changes(swarm.gateway)


@pytest.mark.parametrize(
    ("before", "now", "reported"), [("", B, []), (A, "", [(A, "")]), ("", "", [])]
)
def test_unknown_class_has_no_preference(
    before: str, now: str, reported: list[tuple[str, str]]
) -> None:
    swarm, tail, _ = start_on(before, now)
    swarm.kill(tail.peer)
    finish(swarm)
    assert [each[1:] for each in changes(swarm.gateway)] == reported


def test_new_sessions_use_all_classes() -> None:
    swarm = Swarm()
    swarm.serve(0, 2, of_class(A))
    tails = [swarm.serve(2, 4, of_class(each)) for each in (A, B)]
    for number in range(12):
        swarm.gateway.start(f"s{number}", PROMPT, 3)
    assert {swarm.route(f"s{number}")[-1].peer for number in range(12)} == {t.peer for t in tails}


def test_each_block_keeps_its_own_class() -> None:
    """Both hops are lost at once; a server of all blocks would change the class of one."""
    swarm = Swarm()
    first, second = swarm.serve(0, 2, of_class(A)), swarm.serve(2, 4, of_class(B))
    swarm.gateway.start("s", PROMPT, 20, ahead=4)
    swarm.serve(0, 4, of_class(A))
    heads = [swarm.serve(0, 2, of_class(each)) for each in (B, A)]
    tails = [swarm.serve(2, 4, of_class(each)) for each in (A, B)]
    Network.kill(swarm, first.peer)  # without a run of the network between the two
    swarm.kill(second.peer)
    assert swarm.route("s") == [heads[1], tails[1]]
    finish(swarm)
    assert not changes(swarm.gateway)


def test_takeover_replaces_a_lost_hop_in_its_class() -> None:
    """The gateway that takes over knows the class of a hop that it found, even if it never ran there for it."""
    made = takeover_network()
    made.serve(0, 2, of_class(A))
    tail = made.serve(2, 4, of_class(A))
    first = add_gateway(made, 1)
    first.start("s", PROMPT, 40, ahead=8, above=0)
    others = [made.serve(2, 4, of_class(each)) for each in (B, B, A, B)]
    second = add_gateway(made, 2)
    made.kill(first.peer)
    made.wait(LEASE + 1)
    log = second.adopt(second.find("s"))
    made.kill(tail.peer)
    second.start("s", log, len(PROMPT) + 40 - len(log))
    assert second.route("s")[-1] == others[2].peer
    assert [*log, *second.tokens("s")] == [*PROMPT, *expected(PROMPT, 40)]
    assert not changes(second)


def rebalanced(*others: str) -> tuple[Swarm, list[Server]]:
    """Return a swarm after a while in which one tail of class A had six sessions, and the other tails none."""
    swarm = Swarm(settings=GatewaySettings(rebalance_after_seconds=3.0))
    swarm.serve(0, 2, of_class(A))
    swarm.serve(2, 4, of_class(A))
    names = [f"c{number}" for number in range(6)]
    for name in names:
        swarm.gateway.start(name, PROMPT, 70, ahead=5)
    servers = [swarm.serve(2, 4, of_class(each)) for each in others]
    for count in range(6, 40):
        for name in names:
            swarm.core.on_read(name, len(PROMPT) + count - 5, swarm.now)
        swarm.run()
        swarm.wait(0.2)
    return swarm, servers


def own_sessions(swarm: Swarm, server: Server) -> int:
    return {view.peer: view.own_sessions for view in swarm.core.server_views()}[server.peer]


def test_rebalancing_prefers_a_replica_of_the_class() -> None:
    swarm, [other, same] = rebalanced(B, A)
    assert own_sessions(swarm, same) > 0 and own_sessions(swarm, other) == 0
    assert not changes(swarm.gateway)


def test_rebalancing_uses_another_class_if_it_must() -> None:
    swarm, [other] = rebalanced(B)
    assert own_sessions(swarm, other) > 0
    assert changes(swarm.gateway)[0] == (other.peer, A, B)


def test_servers_of_one_route_may_have_several_classes() -> None:
    swarm, _, _ = start_on(B)
    finish(swarm)
    assert not changes(swarm.gateway)
    views = {view.first: view.numerics for view in swarm.core.server_views()}
    assert views == {0: A, 2: B}


def test_neighbours_of_one_class_are_one_entry() -> None:
    hops = [BlockClass(0, 2, A), BlockClass(2, 4, A), BlockClass(4, 6, B), BlockClass(6, 8, A)]
    joined = joined_classes(hops)
    assert joined == (BlockClass(0, 4, A), BlockClass(4, 6, B), BlockClass(6, 8, A))
    assert other_classes(joined, BlockClass(3, 7, A)) == [B]
    assert other_classes(joined, BlockClass(3, 7, "")) == [A, B]
    assert other_classes([BlockClass(4, 6, "")], hops[2]) == []
