"""Two sessions start a next turn, and pages suffice for one (R8: parked, R12: admission), with both cores."""

from __future__ import annotations

import pytest
from support.core.gateway import Gateway, add_gateway
from support.core.network import Network
from support.core.server import Options, Server, expected

from modelswarm.protocol.messages import Lane
from modelswarm_gateway.core.interface.effects import Refused
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_serving.core.kv.admission import MEMORY_PAUSE_SECONDS

PAGES, PAGE = 20, 4
PROMPT, FIRST = [5, 6, 7], 3  # the first turn reserves two pages
SECOND = 40  # tokens of the next turn: 12 pages, so only one turn fits
SESSIONS = ("a", "b")


def start_two() -> tuple[Network, list[Gateway], list[Server]]:
    """Return two gateways with one session each over the same two servers, after their first turns."""
    network = Network(options=Options(total_pages=PAGES, page_size=PAGE))
    servers = [network.serve(0, 2), network.serve(2, 4)]
    gateways = [add_gateway(network, 1), add_gateway(network, 2)]
    for name, gateway in zip(SESSIONS, gateways, strict=True):
        gateway.start(name, PROMPT, FIRST)
    return network, gateways, servers


def next_prompt() -> list[int]:
    return [*PROMPT, *expected(PROMPT, FIRST), 9]


def grant_one_hop_each(network: Network, gateways: list[Gateway], servers: list[Server]) -> None:
    """Begin both turns. Each is granted at one server first, and then refused at the other."""
    one, other = gateways
    network.held |= {
        (one.peer, servers[1].peer, Lane.LIVE),
        (other.peer, servers[0].peer, Lane.LIVE),
    }
    for name, gateway in zip(SESSIONS, gateways, strict=True):
        gateway.begin(name, next_prompt(), SECOND)
    network.run()
    network.held.clear()
    network.run()
    for name, gateway in zip(SESSIONS, gateways, strict=True):
        assert isinstance(gateway.troubles(name)[-1], Refused)


@pytest.mark.parametrize("first", [0, 1])
def test_refused_turns_leave_room_for_one_of_them(first: int) -> None:
    network, gateways, servers = start_two()
    grant_one_hop_each(network, gateways, servers)
    for at in (first, 1 - first):
        name, gateway = SESSIONS[at], gateways[at]
        gateway.effects.clear()
        gateway.start(name, next_prompt(), SECOND)
        assert gateway.tokens(name) == expected(next_prompt(), SECOND)
        gateway.core.close_session(name, network.now)
        network.run()


def test_refused_turn_keeps_the_pages_of_its_kv_only() -> None:
    network, gateways, servers = start_two()
    grant_one_hop_each(network, gateways, servers)
    kept = -(-(len(PROMPT) + FIRST - 1) // PAGE)
    for server in servers:
        assert server.core.stats.free_pages == PAGES - 2 * kept
        assert [hop.kv for hop in server.core._fencing.hops] == [len(PROMPT) + FIRST - 1] * 2


def put_two_hops_on_one_server(total_pages: int) -> tuple[Gateway, Server, list[int]]:
    """Replace the servers of both halves, one after the other, by a server of all blocks. Return it and the log."""
    network = Network(options=Options(total_pages=total_pages, page_size=PAGE))
    halves = [network.serve(0, 2), network.serve(2, 4)]
    gateway = add_gateway(network)
    gateway.start("a", PROMPT, 1)
    whole = network.serve(0, 4)
    log = [*PROMPT, *expected(PROMPT, 1)]
    for half in halves:
        network.kill(half.peer)
        gateway.clear_and_start("a", log, 1)
        log += gateway.tokens("a")
    assert gateway.route("a") == [whole.peer] * 2
    return gateway, whole, log


def test_two_hops_on_one_server_become_one_for_lack_of_room() -> None:
    """A turn that fits once does not fit twice."""
    gateway, whole, log = put_two_hops_on_one_server(PAGES)
    gateway.clear_and_start("a", log, SECOND)
    assert isinstance(gateway.troubles("a")[-1], Refused)
    gateway.clear_and_start("a", log, SECOND)
    assert gateway.tokens("a") == expected(log, SECOND)
    assert gateway.route("a") == [whole.peer]


def test_two_hops_keep_their_kv_in_a_pause_of_admissions() -> None:
    gateway, whole, log = put_two_hops_on_one_server(4 * PAGES)
    whole.core.pause_admissions(gateway.network.now)
    gateway.clear_and_start("a", log, SECOND)
    assert isinstance(gateway.troubles("a")[-1], Refused)
    gateway.network.wait(MEMORY_PAUSE_SECONDS + 1)
    gateway.clear_and_start("a", log, SECOND)
    assert gateway.tokens("a") == expected(log, SECOND)
    assert gateway.route("a") == [whole.peer] * 2
    assert gateway.view("a").reused == len(log) - 1


def fill_servers(network: Network, gateway: Gateway, turn: int) -> list[str]:
    """Start sessions of `turn` tokens until one is refused; return the others."""
    names: list[str] = []
    while not names or not gateway.troubles(names[-1]):
        names.append(f"filler{len(names)}")
        gateway.start(names[-1], [7, 8, 9, len(names)], turn)
    gateway.core.close_session(names.pop(), network.now)
    network.run()
    gateway.effects.clear()
    return names


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_refused_turn_keeps_route_and_kv(replicas: int) -> None:
    """All replicas of the tail refuse, one after the other. Its KV is used again when there is room."""
    network = Network(options=Options(page_size=PAGE))
    network.serve(0, 2, total_pages=400)
    for _ in range(replicas):
        network.serve(2, 4, total_pages=PAGES)
    gateway = add_gateway(network, 1)
    gateway.start("a", PROMPT, FIRST)
    route = gateway.route("a")
    fillers = fill_servers(network, gateway, 28)
    gateway.start("a", next_prompt(), SECOND)
    assert isinstance(gateway.troubles("a")[-1], Refused)
    assert gateway.route("a") == route
    for name in fillers:
        gateway.core.close_session(name, network.now)
    network.run()
    rows = {peer: server.core.heartbeat().rows for peer, server in network.servers.items()}
    gateway.clear_and_start("a", next_prompt(), SECOND)
    assert gateway.tokens("a") == expected(next_prompt(), SECOND)
    run = {peer: s.core.heartbeat().rows - rows[peer] for peer, s in network.servers.items()}
    assert gateway.view("a").reused == len(PROMPT) + FIRST - 1
    assert {peer for peer, count in run.items() if count} == set(route)
    assert len({run[peer] for peer in route}) == 1, run


def test_refused_turn_leaves_log_and_turn_as_they_were() -> None:
    network = Network(options=Options(total_pages=PAGES, page_size=PAGE))
    for _ in range(2):
        network.serve(0, 4)
    gateway = add_gateway(network, 1)
    gateway.start("a", PROMPT, FIRST, above=0)
    fillers = fill_servers(network, gateway, 25)
    before = gateway.core.parked_turn("a")
    assert before is not None
    for log in (next_prompt(), [*PROMPT[:2], 60]):  # appended, and rewound
        gateway.start("a", log, SECOND + 20)
        assert isinstance(gateway.troubles("a")[-1], Refused)
        assert gateway.core.parked_turn("a") == before
        assert gateway.view("a").wanted_positions == len(log) + SECOND + 19
    for name in fillers:
        gateway.core.close_session(name, network.now)
    network.run()
    gateway.clear_and_start("a", next_prompt(), SECOND)
    assert gateway.tokens("a") == expected(next_prompt(), SECOND)


def test_turn_whose_route_is_lost_before_its_start_costs_no_log() -> None:
    """It is held, and refused at the hold limit. The session goes on from its log later."""
    network = Network()
    gateway = add_gateway(network, settings=GatewaySettings(hold_limit_seconds=1.0))
    tail = [network.serve(0, 2), network.serve(2, 4)][-1]
    prompt = next_prompt()
    gateway.start("a", PROMPT, FIRST, above=0)
    gateway.begin("a", prompt, FIRST)
    network.kill(tail.peer)
    network.run()
    assert gateway.view("a").state == "held"
    network.wait(2.0)
    assert [type(each) for each in gateway.troubles("a")] == [Refused]
    assert gateway.view("a").length == len(prompt) - 1
    network.serve(2, 4)
    network.run()
    gateway.clear_and_start("a", prompt, FIRST)
    assert gateway.tokens("a") == expected(prompt, FIRST)


def test_turn_that_was_held_before_its_start_goes_on() -> None:
    network = Network()
    gateway = add_gateway(network)
    tail = [network.serve(0, 2), network.serve(2, 4)][-1]
    prompt = next_prompt()
    gateway.start("a", PROMPT, FIRST, above=0)
    gateway.effects.clear()
    gateway.begin("a", prompt, FIRST)
    network.kill(tail.peer)
    network.run()
    network.serve(2, 4)
    network.wait(5.0)
    assert gateway.tokens("a") == expected(prompt, FIRST)
