"""Copy steps and row steps of a server (R13, migration): they alternate, and neither delays the other for long."""

from __future__ import annotations

import pytest
from support.core.kv_transfer import (
    CONTEXT,
    READ,
    Spare,
    copying,
    opened_beside,
    order,
    run_without,
    running,
    warm,
)
from support.core.peer_comparison import compare
from support.core.scripted_gateway import Client, ServerNetwork, opened, prompt
from support.core.server import Options, Server

from modelswarm_gateway.core.servers.step_times import StepTimes
from modelswarm_serving.core.kv.transfer import STEP_BYTES
from modelswarm_serving.core.stall_estimator import SAMPLE_SECONDS
from modelswarm_serving.model.base import BatchItem, KvRead, KvWrite


def test_copy_steps_alternate_with_row_steps() -> None:
    network = ServerNetwork()
    client = running(network)
    spare = opened_beside(client, 1)
    neighbour = Client(
        network,
        [client.hops[0], (spare.server, 2, 4), client.hops[2]],
        list(range(20)),
        session="b",
        base=500,
    )
    neighbour.start(60, credit=30)
    neighbour.finish()
    warm(spare)
    order(spare)
    neighbour.raise_credit(1000)
    run_without(network, spare.server)
    seen = []
    while spare.server.begin_step(network.now):
        seen.append({type(task) for task in spare.server.out})
        spare.server.end_step(network.now)
    assert seen[:2] == [{KvWrite}, {BatchItem}] and all(len(types) == 1 for types in seen)
    network.run()
    assert spare.kv == len(client.log) - 1 and not spare.reports


ROW = 1 << 17  # one position fills a group


def large(network: ServerNetwork) -> Spare:
    """Start a copy for a large model on a fast device: half a position of KV may be read per step."""
    client = opened(network, hops=1, length=CONTEXT, new=120, row_bytes=ROW, transfer_rate=25 * ROW)
    client.resume(credit=CONTEXT + READ)
    spare = copying(client, 0, row_bytes=ROW)
    client.raise_credit(1000)
    return spare


def round_of(network: ServerNetwork, *servers: Server) -> int:
    """Run a step of rows and a copy step on each server. Return the number of positions read for copies."""
    read = 0
    network.now += 0.02
    for server in (each for each in servers for _ in range(2)):
        network.deliver_all()
        if server.begin_step(network.now):
            read += sum(task.count for task in server.out if isinstance(task, KvRead))
            server.end_step(network.now)
    network.deliver_all()
    return read


def test_copy_catches_up_where_new_kv_exceeds_copy_rate() -> None:
    network = ServerNetwork()
    spare = large(network)
    lags = []
    for _ in range(CONTEXT + READ):
        round_of(network, *network.servers.values())
        spare.client.listen()
        lags.append(len(spare.client.log) - 1 - spare.kv)
    assert lags[-1] < 5 < CONTEXT < lags[0], lags


def test_delayed_copy_does_not_catch_up_in_one_step() -> None:
    network = ServerNetwork()
    spare = large(network)
    old = spare.client.hops[0][0]
    for _ in range(40):
        at_last = round_of(network, old)
    assert not at_last, "its window is used up"
    read = [round_of(network, *network.servers.values()) for _ in range(20)]
    assert 0 < max(read) <= STEP_BYTES // ROW, read


def test_write_limit_grows_with_steady_arrivals_only() -> None:
    """A step of the target takes as long as eight steps of the source: 16 positions arrive in each."""
    network = ServerNetwork()
    spare = large(network)
    old = spare.client.hops[0][0]
    written = []
    for _ in range(12):
        for _ in range(8):
            round_of(network, old)
        spare.server.begin_step(network.now)
        written.append(sum(task.count for task in spare.server.out if isinstance(task, KvWrite)))
        spare.server.end_step(network.now)
    assert written[0] == STEP_BYTES // ROW < written[-1], written


HALF = 1 << 16  # two positions fill a group
LARGE: Options = {
    "row_bytes": HALF,
    "transfer_rate": 32 << 20,
    "total_pages": 1200,
    "max_length": 4096,
}
STEP, COPY = 0.02, 0.001  # seconds per step of rows, and per copy step


class Timed:
    """A server whose steps take time. It sends a heartbeat every 0.1 s."""

    def __init__(self, server: Server) -> None:
        self.server, self.pace, self.until, self.heartbeat_at = server, StepTimes(), 0.0, 0.0

    def turn(self, now: float) -> None:
        if self.server.out and now >= self.until - 1e-9:
            self.server.end_step(now)
        if not self.server.out and self.server.begin_step(now):
            self.until = now + (STEP if self.server.works else COPY)
        if now >= self.heartbeat_at:
            self.heartbeat_at = now + 0.1
            self.pace.record_heartbeat(self.server.core.heartbeat(), now)


def session(network: ServerNetwork, server: Server, number: int, length: int) -> Client:
    client = Client(
        network, [(server, 0, 6)], prompt(length), session=f"s{number}", base=1000 * number
    )
    client.start(400, credit=length)
    client.finish()
    return client


@pytest.mark.parametrize("every", [None, 0.04])
def test_copying_does_not_change_reported_step_times(every: float | None) -> None:
    """`every`: seconds between two tokens; None: no pause."""
    network = ServerNetwork()
    copied, plain = (session(network, network.serve(0, 6, **LARGE), n, 2000) for n in (1, 2))
    spare = copying(copied, 0, **LARGE)
    spare.feed()
    timed = [Timed(client.hops[0][0]) for client in (copied, plain)]
    target = Timed(spare.server)
    while network.now < 3.5:
        network.now += 0.001
        credit = 1 << 40 if every is None else 2000 + int(network.now / every)
        for client in (copied, plain):
            client.raise_credit(credit)
        network.deliver_all()
        for each in (*timed, target):
            each.turn(network.now)
        network.deliver_all()
    beside_copy, alike = (each.pace.per_block(6, network.now) for each in timed)
    found = compare(alike, [beside_copy])
    assert found is not None and 0.8 < found.ratio < 1.3


def test_busy_time_of_rows_includes_stalls_of_copies() -> None:
    network = ServerNetwork()
    server = large(network).client.hops[0][0]
    before = server.core.heartbeat()
    for _ in range(10):
        network.deliver_all()
        server.core.sample_stalls(network.now, SAMPLE_SECONDS)
        assert server.begin_step(network.now)
        network.now += 0.01 if server.works else 0.2
        server.core.sample_stalls(network.now, SAMPLE_SECONDS)
        server.end_step(network.now)
    heartbeat = server.core.heartbeat()
    assert heartbeat.steps - before.steps == 5
    assert heartbeat.busy_ms - before.busy_ms > 2 * 5 * 10, (
        "a step of 10 ms, with its share of all stalls"
    )


def test_last_position_is_copied_before_far_behind_copies() -> None:
    network = ServerNetwork()
    server = network.serve(0, 6, **LARGE)
    clients = [session(network, server, n, 20 if n == 1 else 60) for n in range(1, 9)]
    spares = [opened_beside(client, 0, 900 + n, **LARGE) for n, client in enumerate(clients)]
    resting, last = clients[0], spares[0]
    for spare in spares:
        warm(spare)

    def round_of_all() -> None:
        network.now += 0.002
        network.deliver_all()
        if server.begin_step(network.now):
            network.now += 0.018 if server.works else 0.0
            server.end_step(network.now)
        network.deliver_all()
        for spare in spares:
            while spare.server.begin_step(network.now):
                spare.server.end_step(network.now)
                network.deliver_all()

    order(last)
    for _ in range(60):
        round_of_all()
    assert last.kv == 20
    for client, spare in zip(clients[1:], spares[1:], strict=True):
        order(spare)
        client.raise_credit(1 << 40)
    for _ in range(5):
        round_of_all()
    resting.raise_credit(21)
    began = network.now
    while last.kv == 20 and network.now - began < 1.0:
        round_of_all()
    assert network.now - began < 3 * STEP, "the running step, one with its row, and then the copy"
    assert max(spare.kv for spare in spares[1:]) < 60, "they had many positions to read"


def test_read_in_a_step_keeps_its_pages_when_the_hop_shrinks() -> None:
    """A turn ends during a KV read. The next turn rewinds to fewer pages: its Fence truncates at once (R8, parked)."""
    network = ServerNetwork(options={"n_blocks": 6, "total_pages": 64, "page_size": 4})
    client = running(network)
    source = client.hops[1][0]
    copying(client, 1)
    network.run(until=lambda: any(isinstance(task, KvRead) for task in source.out))
    [read] = source.out
    before = list(read.pages)
    del client.log[10:]
    client.fence(2)
    network.deliver_all()
    assert source.core.stats.free_pages > 64 - len(before)
    assert list(read.pages) == before
    source.end_step(network.now)
    network.run()
    client.listen()
    assert [token.token for token in client.resume()] == client.expected(client.log[:10], 2)
