"""Server cores on the hash model without faults: the tokens of the tail equal the oracle's on any route."""

from __future__ import annotations

import pytest
from support.core.scripted_gateway import (
    Client,
    ServerNetwork,
    make_clients,
    prompt,
    route,
    start_all,
)
from support.core.server import VOCABULARY

from modelswarm.protocol.messages import Finish, Lane, Rows, Sampling, Token, Window
from modelswarm_serving.model.hash_model import reference_tokens


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 7, 40])
def test_tokens_equal_oracle_for_any_number_of_hops(hops: int, length: int) -> None:
    network = ServerNetwork()
    client = Client(network, route(network, hops), prompt(length))
    expected = client.expected(client.log, 12)
    client.start(12)
    tokens = client.finish()
    assert [token.token for token in tokens] == expected
    assert [token.finish for token in tokens] == [Finish.NONE] * 11 + [Finish.LENGTH]
    assert not client.reports


@pytest.mark.parametrize("seed", range(30))
def test_tokens_equal_oracle_in_any_interleaving(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    servers = route(network, 3, total_pages=200, token_budget=9, row_window=5)
    clients = make_clients(network, servers, [1 + 5 * at for at in range(6)])
    expected = [client.expected(client.log, 8) for client in clients]
    start_all(clients, 8)
    for client, wanted in zip(clients, expected, strict=True):
        assert [token.token for token in client.finish()] == wanted
        assert not client.reports


@pytest.mark.parametrize("row_bytes", [8, 24])
def test_long_prompt_runs_in_chunks_within_window(row_bytes: int) -> None:
    network = ServerNetwork()
    servers = route(
        network, 2, total_pages=200, token_budget=16, row_window=24, row_bytes=row_bytes
    )
    client = Client(network, servers, prompt(300))
    expected = client.expected(client.log, 4)
    client.start(4)
    assert [token.token for token in client.finish()] == expected
    windows = [send.item for send in network.sent(Window)]
    limits = [window.limit for window in windows if isinstance(window, Window)]
    assert limits == sorted(limits) and max(limits) <= client.end - 1
    assert len(windows) < 60
    assert network.servers["s0/1/b"].core.stats.steps >= 300 // 16


def test_rows_wait_for_window_of_successor() -> None:
    network = ServerNetwork()
    servers = route(network, 2, total_pages=200, row_window=10)
    client = Client(network, servers, prompt(100))
    client.refence(4)
    client.go()
    network.remove(servers[1][0].peer)  # it answers the Fence, and then sends no window
    network.run()
    assert not network.sent(Rows)
    assert servers[0][0].core.stats.rows == 0


def test_prompt_rows_go_on_bulk_and_later_rows_on_live() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(20))
    client.start(5)
    client.finish()
    rows = [(send.lane, send.item) for send in network.sent(Rows) if isinstance(send.item, Rows)]
    bulk = [item for lane, item in rows if lane is Lane.BULK]
    live = [item for lane, item in rows if lane is Lane.LIVE]
    assert [at for each in bulk for at in range(each.first, each.first + each.count)] == [
        *range(19)
    ]
    assert not any(each.sample for each in bulk)
    assert [(each.first, each.count) for each in live] == [(at, 1) for at in range(19, 24)]
    assert all(each.sample for each in live)


def test_bulk_row_groups_are_at_most_256_kib() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2, row_bytes=64 * 1024, total_pages=200), prompt(30))
    client.start(2)
    client.finish()
    sizes = [len(send.item.payload) for send in network.sent(Rows) if isinstance(send.item, Rows)]
    assert max(sizes) == 256 * 1024
    assert [token.position for token in client.tokens] == [30, 31]


def test_live_rows_wait_until_bulk_rows_are_acknowledged() -> None:
    network = ServerNetwork()
    servers = route(network, 2)
    client = Client(network, servers, prompt(10))
    client.start(3)
    bulk = (servers[0][0].peer, servers[1][0].peer, Lane.BULK)
    network.run(until=lambda: bulk in network.lanes)  # until the prompt's rows are in flight
    held = network.lanes.pop(bulk)
    network.run()
    assert all(send.lane is Lane.BULK for send in network.sent(Rows))
    network.lanes[bulk] = held
    assert len(client.finish()) == 3
    assert not client.reports


def test_decode_ring_stops_at_credit_and_resumes_when_raised() -> None:
    network = ServerNetwork()
    for hops in (1, 2, 3):
        client = Client(
            network, route(network, hops), prompt(5), session=f"c{hops}", base=1000 * hops
        )
        expected = client.expected(client.log, 20)
        client.start(20, credit=8)
        # tokens 5, 6 and 7 entered the ring; 8 was sampled and is held
        assert [token.position for token in client.finish()] == [5, 6, 7, 8]
        client.raise_credit(8)
        assert len(client.finish()) == 4
        client.raise_credit(10)
        assert [token.position for token in client.finish()] == [5, 6, 7, 8, 9, 10]
        client.raise_credit(1000)
        assert [token.token for token in client.finish()] == expected


def test_zero_credit_gives_one_token() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(5))
    client.start(20, credit=0)
    assert [token.position for token in client.finish()] == [5]


@pytest.mark.parametrize("hops", [1, 2])
def test_eos_token_ends_turn_and_is_stored_but_not_run(hops: int) -> None:
    network = ServerNetwork()
    free = Client(network, route(network, hops), prompt(9, seed=1))
    generated = free.expected(free.log, 30)
    eos = generated[4]
    assert eos not in generated[:4]
    client = Client(network, free.hops, prompt(9, seed=1), sampling=Sampling(eos=(eos,)))
    client.start(30, credit=0 if hops == 1 else 9)
    client.raise_credit(13)  # entry 13 is the last: it is stored without credit
    tokens = client.finish()
    assert [token.finish for token in tokens][-1] is Finish.STOP
    assert tokens[-1].token == eos
    client.refence()
    length = len(client.log)
    assert [answer.kv for answer in client.fenced.values()] == [length - 1] * hops
    assert client.fenced[0].log == client.fenced[hops - 1].log == length


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("length", [1, 2, 30])
def test_turn_without_sampling_only_prefills(hops: int, length: int) -> None:
    network = ServerNetwork()
    client = Client(network, route(network, hops), prompt(length))
    client.start(0, sample=False)
    (token,) = client.finish()
    assert (token.position, token.token, token.finish) == (length, -1, Finish.LENGTH)
    assert all(isinstance(item, Token) for _, item in network.answers[hops:])
    client.start(6)  # the next turn continues from the prefilled KV
    assert [answer.kv for answer in client.fenced.values()] == [length - 1] * hops
    expected = client.expected(client.log, 6)
    assert [token.token for token in client.finish()] == expected


def test_tokens_depend_on_sampling_params_and_seed() -> None:
    def tokens(sampling: Sampling) -> list[int]:
        return reference_tokens(prompt(5), sampling, 9, 14, n_blocks=6, vocabulary=VOCABULARY)

    warm = Sampling(temperature=1.0, seed=3)
    assert tokens(warm) == tokens(Sampling(temperature=1.0, seed=3))
    assert tokens(warm) != tokens(Sampling(temperature=1.0, seed=4))
    assert tokens(warm) != tokens(Sampling())
    network = ServerNetwork()
    client = Client(network, route(network, 2), prompt(5), sampling=warm)
    client.start(9)
    assert [token.token for token in client.finish()] == tokens(warm)


def test_next_turn_continues_from_existing_kv() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 3, total_pages=100), prompt(11))
    client.start(5)
    client.finish()
    rows = network.servers["s1/1/b"].core.stats.rows
    client.log += prompt(6, seed=9)
    expected = client.expected(client.log, 7)
    client.start(7)
    assert [token.token for token in client.finish()] == expected
    # the last token of the first turn, six new entries, six of the seven generated ones
    assert network.servers["s1/1/b"].core.stats.rows - rows == 1 + 6 + 6


def test_rewind_truncates_kv_and_log_copies() -> None:
    network = ServerNetwork()
    client = Client(network, route(network, 3, total_pages=100), prompt(20))
    client.start(10)
    client.finish()
    client.log = [*client.log[:8], *prompt(5, seed=4)]
    expected = client.expected(client.log, 10)
    client.refence(10, kv_cut=8, log_cut=8)
    assert [answer.kv for answer in client.fenced.values()] == [8, 8, 8]
    assert [client.fenced[at].log for at in range(3)] == [8, 0, 8]
    assert [token.token for token in client.resume()] == expected


def test_one_server_may_be_head_and_tail_of_a_route() -> None:
    network = ServerNetwork()
    whole, middle = network.serve(0, 6), network.serve(2, 4)
    client = Client(network, [(whole, 0, 2), (middle, 2, 4), (whole, 4, 6)], prompt(9))
    expected = client.expected(client.log, 10)
    client.start(10)
    assert [token.token for token in client.finish()] == expected
    assert not [send for send in network.sent(Token) if send.to.peer == whole.peer]


def test_adjacent_hops_on_one_server_need_no_link() -> None:
    network = ServerNetwork(seed=1)
    whole = network.serve(0, 6, row_window=3)
    client = Client(network, [(whole, 0, 2), (whole, 2, 3), (whole, 3, 6)], prompt(9))
    expected = client.expected(client.log, 10)
    client.start(10)
    assert [token.token for token in client.finish()] == expected


def test_decode_rows_are_split_into_one_group_per_hop() -> None:
    network = ServerNetwork()
    servers = route(network, 2, total_pages=400)
    clients = make_clients(network, servers, [3] * 8)
    start_all(clients, 60)
    tail = servers[1][0]
    sizes: list[int] = []
    for _ in range(4000):
        network.run(1)
        if tail.works and all(work.sample and work.first >= 3 for work in tail.works):
            sizes.append(len(tail.out))
    assert sizes and max(sizes) == 4  # 8 sessions in two groups
    for client in clients:
        assert len(client.finish()) == 60


def test_longer_route_does_not_split_sessions_of_one_hop() -> None:
    """Six sessions run on one server alone, and one more has its last blocks on another server."""
    network = ServerNetwork()
    whole, rest = (network.serve(first, 6, total_pages=400) for first in (0, 3))
    clients = make_clients(network, [(whole, 0, 6)], [3] * 6)
    hops = [(whole, 0, 3), (rest, 3, 6)]
    clients.append(Client(network, hops, prompt(3), session="long", base=9000))
    start_all(clients, 60)
    sizes: list[int] = []
    for _ in range(1000):
        network.run(1)
        if whole.works and all(work.first >= 3 for work in whole.works):
            sizes.append(len(whole.works))
    assert sorted(sizes)[len(sizes) // 2] >= 6, "most steps, without those at the end"
    for client in clients:
        assert len(client.finish()) == 60
