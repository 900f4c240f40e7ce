"""Recovery computes only the lost blocks again: whole routes on the hash model with lost servers (R6, replay)."""

from __future__ import annotations

from typing import Unpack

import pytest
from support.core.scripted_gateway import Client, ServerNetwork, opened, prompt
from support.core.server import Options

from modelswarm.placement.replay_memory import GROUP_OVERHEAD
from modelswarm.protocol.messages import FaultKind, Lane, RetainedRows, Rows

CONTEXT, NEW, READ = 60, 30, 20


def busy(
    network: ServerNetwork, hops: int = 3, **options: Unpack[Options]
) -> tuple[Client, list[int]]:
    """Return a session that has prefilled and generated some tokens, and its remaining reference tokens."""
    client = opened(network, hops=hops, length=CONTEXT, new=NEW, **options)
    client.resume(credit=CONTEXT + READ)
    assert not client.reports
    rest = client.expected(client.log, client.end - len(client.log))
    return client, rest


def lose(network: ServerNetwork, client: Client, *lost: int, **options: Unpack[Options]) -> None:
    for hop in lost:
        server, first, last = client.hops[hop]
        network.remove(server.peer)
        client.replace_hop(hop, network.serve(first, last, **options))


def repair(network: ServerNetwork, client: Client) -> list[int]:
    """Run the recovery loop until the network is idle. Return the rows that each hop of the new route ran for it."""
    before = [server.core.stats.rows for server, _, _ in client.hops]
    client.refence(repair=True)
    client.resume()
    after = [server.core.stats.rows for server, _, _ in client.hops]
    return [b - a for a, b in zip(before, after, strict=True)]


@pytest.mark.parametrize("lost", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("row_window", [1024, 8])
def test_surviving_hops_run_no_row_twice(lost: tuple[int, ...], row_window: int) -> None:
    network = ServerNetwork()
    client, rest = busy(network, row_window=row_window)
    context = len(client.log) - 1
    lose(network, client, *lost, row_window=row_window)
    ran = repair(network, client)
    assert [token.token for token in client.tokens] == rest
    assert ran == [len(rest) + (context if hop in lost else 0) for hop in range(3)]


@pytest.mark.parametrize("seed", range(10))
def test_retained_rows_go_on_bulk_before_live_rows(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client, rest = busy(network, row_window=8)
    context = len(client.log) - 1
    lose(network, client, 2, row_window=8)
    head, middle = client.hops[0][0].peer, client.hops[1][0].peer
    del network.record[:]
    repair(network, client)
    assert [token.token for token in client.tokens] == rest
    groups = [
        (send.item.first, send.lane)
        for send in network.sent(Rows, middle)
        if isinstance(send.item, Rows)
    ]
    assert [first for first, _ in groups] == sorted(first for first, _ in groups)
    assert all((lane is Lane.BULK) == (first < context) for first, lane in groups)
    assert min(first for first, _ in groups) == 0
    assert all(
        send.item.first >= context
        for send in network.sent(Rows, head)
        if isinstance(send.item, Rows)
    )


def test_fence_ack_names_retained_rows_except_at_tail() -> None:
    network = ServerNetwork()
    client, _ = busy(network)
    client.refence()
    kv = len(client.log) - 1
    assert [client.fenced[hop].retained for hop in range(3)] == [
        (RetainedRows(2, 0, kv),),
        (RetainedRows(4, 0, kv),),
        (),
    ]


def test_fence_truncates_retained_rows() -> None:
    network = ServerNetwork()
    client, _ = busy(network)
    client.refence(kv_cut=33, log_cut=34)
    assert client.fenced[0].retained == (RetainedRows(2, 0, 33),)


def test_hops_restart_at_end_of_retained_rows() -> None:
    network = ServerNetwork()
    client, rest = busy(network, replay_bytes=GROUP_OVERHEAD + 8 * CONTEXT + 10)
    beyond = len(client.log) - 1 - CONTEXT
    lose(network, client, 2)
    ran = repair(network, client)
    assert [token.token for token in client.tokens] == rest
    assert ran == [beyond + len(rest), beyond + len(rest), CONTEXT + beyond + len(rest)]


def test_retained_rows_evicted_after_fence_ack_are_a_gap() -> None:
    network = ServerNetwork()
    client, rest = busy(network)
    lose(network, client, 2)
    client.refence(repair=True)
    client.hops[1][0].core._replay_log.drop(client.own[1])
    client.resume()
    assert {report.kind for report in client.reports} == {FaultKind.GAP}
    assert all(report.peer == "" for report in client.reports)
    repair(network, client)
    assert [token.token for token in client.tokens] == rest


def test_closed_session_frees_its_retained_rows() -> None:
    network = ServerNetwork()
    client, _ = busy(network)
    assert [server.core.stats.replay_bytes > 0 for server, _, _ in client.hops] == [
        True,
        True,
        False,
    ]
    client.close()
    network.run()
    assert all(server.core.stats.replay_bytes == 0 for server, _, _ in client.hops)


@pytest.mark.parametrize("seed", range(20))
def test_server_loss_during_recovery_is_recovered(seed: int) -> None:
    network = ServerNetwork(seed=seed)
    client, rest = busy(network, row_window=8, token_budget=8)
    for _ in range(4):
        lose(network, client, network.random.randrange(3), row_window=8, token_budget=8)
        client.refence(repair=True)
        client.go(credit=0)
        network.run(network.random.randrange(5, 80))
        client.listen()
    network.run()
    client.listen()
    got = len(client.log) - CONTEXT - READ - 1
    repair(network, client)
    whole = [token.token for token in client.tokens]
    assert whole == rest[len(rest) - len(whole) :] and len(whole) + got >= len(rest)


def test_surviving_hop_retains_its_rows_for_second_loss() -> None:
    network = ServerNetwork()
    client, rest = busy(network)
    lose(network, client, 1)
    client.refence(repair=True)
    client.resume(credit=len(client.log) + 3)
    context = len(client.log) - 1
    lose(network, client, 2)
    ran = repair(network, client)
    done = len(client.tokens)
    assert done > 0
    assert [token.token for token in client.tokens] == rest[len(rest) - done :]
    assert ran == [done, done, done + context]


SHAPES = [
    ([(0, 3), (3, 6)], {1}, [(0, 3), (3, 4), (4, 6)]),  # one hop becomes two
    ([(0, 2), (2, 4), (4, 6)], {1, 2}, [(0, 2), (2, 6)]),  # two become one
    ([(0, 2), (2, 4), (4, 6)], {0, 1}, [(0, 3), (3, 4), (4, 6)]),  # a boundary moves
    ([(0, 2), (2, 4), (4, 6)], {1}, [(0, 2), (2, 3), (3, 4), (4, 6)]),
]


@pytest.mark.parametrize(("before", "lost", "after"), SHAPES)
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_recovery_with_other_spans_replays_only_new_hops(
    before: list[tuple[int, int]],
    lost: set[int],
    after: list[tuple[int, int]],
    seed: int | None,
) -> None:
    network = ServerNetwork(seed=seed)
    route = [(network.serve(*span), *span) for span in before]
    client = Client(network, route, prompt(CONTEXT))
    client.start(NEW, credit=CONTEXT + READ)
    client.finish()
    rest = client.expected(client.log, client.end - len(client.log))
    context = len(client.log) - 1
    stay = {span: index for index, span in enumerate(before) if index not in lost}
    owns = list(client.own)
    for index in lost:
        network.remove(route[index][0].peer)
    client.hops = [
        route[stay[span]] if span in stay else (network.serve(*span), *span) for span in after
    ]
    client.own = [owns[stay[span]] if span in stay else 0 for span in after]
    ran = repair(network, client)
    assert [token.token for token in client.tokens] == rest
    assert ran == [len(rest) + (0 if span in stay else context) for span in after]
