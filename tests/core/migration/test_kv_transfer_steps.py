"""When a server copies and when it runs rows (R13): they take turns, and neither makes the other wait for long."""

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


def test_a_copy_and_the_rows_of_others_take_turns() -> None:
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
    """A session of a large model on a fast device is copied: in a step's time half a position of KV may be read."""
    client = opened(network, hops=1, length=CONTEXT, new=120, row_bytes=ROW, transfer_rate=25 * ROW)
    client.resume(credit=CONTEXT + READ)
    spare = copying(client, 0, row_bytes=ROW)
    client.raise_credit(1000)
    return spare


def round_of(network: ServerNetwork, *servers: Server) -> int:
    """A step of rows and one of copies of each. The positions that were read for copies."""
    read = 0
    network.now += 0.02
    for server in (each for each in servers for _ in range(2)):
        network.deliver_all()
        if server.begin_step(network.now):
            read += sum(task.count for task in server.out if isinstance(task, KvRead))
            server.end_step(network.now)
    network.deliver_all()
    return read


def test_a_copy_comes_nearer_also_where_new_kv_is_more_than_its_rate() -> None:
    network = ServerNetwork()
    spare = large(network)
    lags = []
    for _ in range(CONTEXT + READ):
        round_of(network, *network.servers.values())
        spare.client.listen()
        lags.append(len(spare.client.log) - 1 - spare.kv)
    assert lags[-1] < 5 < CONTEXT < lags[0], lags


def test_a_copy_that_had_to_wait_does_not_make_up_for_it_in_one_step() -> None:
    network = ServerNetwork()
    spare = large(network)
    old = spare.client.hops[0][0]
    for _ in range(40):
        at_last = round_of(network, old)
    assert not at_last, "its window is used up"
    read = [round_of(network, *network.servers.values()) for _ in range(20)]
    assert 0 < max(read) <= STEP_BYTES // ROW, read


def test_what_keeps_coming_is_written_as_fast_and_a_burst_is_not() -> None:
    """A target whose steps take eight times as long as those of the hop that it copies: 16 positions come in each."""
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
STEP, COPY = 0.02, 0.001  # seconds that a step takes


class Timed:
    """A server whose steps take time; it beats every 0.1 s."""

    def __init__(self, server: Server) -> None:
        self.server, self.pace, self.until, self.beat_at = server, StepTimes(), 0.0, 0.0

    def turn(self, now: float) -> None:
        if self.server.out and now >= self.until - 1e-9:
            self.server.end_step(now)
        if not self.server.out and self.server.begin_step(now):
            self.until = now + (STEP if self.server.works else COPY)
        if now >= self.beat_at:
            self.beat_at = now + 0.1
            self.pace.record_heartbeat(self.server.core.heartbeat(), now)


def session(network: ServerNetwork, server: Server, number: int, length: int) -> Client:
    client = Client(
        network, [(server, 0, 6)], prompt(length), session=f"s{number}", base=1000 * number
    )
    client.start(400, credit=length)
    client.finish()
    return client


@pytest.mark.parametrize("every", [None, 0.04])
def test_a_server_that_is_copied_seems_as_fast_as_one_that_is_not(every: float | None) -> None:
    """`every`: seconds between two tokens; None: they come as fast as they can."""
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


def test_a_stall_that_hits_a_copy_is_no_excuse_for_rows() -> None:
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
    beat = server.core.heartbeat()
    assert beat.steps - before.steps == 5
    assert beat.busy_ms - before.busy_ms > 2 * 5 * 10, (
        "a step of 10 ms, with its share of all stalls"
    )


def test_a_last_position_does_not_wait_for_copies_that_are_far_behind() -> None:
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
    assert network.now - began < 3 * STEP, (
        "a step that was out, one with its row, and then the copy"
    )
    assert max(spare.kv for spare in spares[1:]) < 60, "they had much to read"
