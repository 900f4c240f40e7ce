"""SIGTERM of a server: it reports the drain, serves its sessions until they move, and exits (R13, migration)."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from support.processes.fake_gateway import EPOCH, FakeGateway, Route, fake_gateway
from support.processes.server import ServerProcess, servers

from modelswarm.protocol.messages import FaultKind, FenceAck, Heartbeat, Refusal, Window

HASH = ("--hash-model", "--pages", "64")
PROMPT = list(range(1, 40))
END = 600


async def session(gateway: FakeGateway, credit: int) -> Route:
    """Open a session that has some tokens and waits for more credit."""
    route = await gateway.open("s", END)
    gateway.go(route, PROMPT, credit=credit)
    await gateway.received.until(lambda: len(gateway.tokens) > 5)
    return route


def raise_credit(gateway: FakeGateway, route: Route, limit: int) -> None:
    tail = route.hops[-1]
    gateway.node.send(tail.address, [Window(tail.handle, EPOCH, 0, limit)])


async def shut_down(gateway: FakeGateway) -> None:
    """Wait until the server reports its shutdown by a FaultReport and by its heartbeats."""
    await gateway.received.until(
        lambda: (
            [report.kind for report in gateway.reports] == [FaultKind.DRAINING]
            and any(
                isinstance(item, Heartbeat) and item.draining for item in gateway.received.items
            )
        )
    )


async def gone(server: ServerProcess) -> int | None:
    return await server.exit_code()


async def test_stopping_server_serves_until_its_session_has_left(tmp_path: Path) -> None:
    async with (
        servers(tmp_path, ["0:8"], *HASH, "--drain-timeout", "600") as (server,),
        fake_gateway([server]) as gateway,
    ):
        route = await session(gateway, credit=len(PROMPT) + 10)
        server.process.send_signal(signal.SIGTERM)
        await shut_down(gateway)
        assert not server.file.exists()
        had = len(gateway.tokens)
        raise_credit(gateway, route, len(PROMPT) + 50)
        await gateway.received.until(lambda: len(gateway.tokens) > had + 20)
        with pytest.raises(AssertionError):
            await gateway.open("t", END)
        refused = [i.refusal for i in gateway.received.items if isinstance(i, FenceAck)]
        assert refused[-1] is Refusal.DRAINING
        gateway.close(route)
        assert await gone(server) == 0


@pytest.mark.full
async def test_unmoved_session_delays_exit_only_to_drain_timeout(
    tmp_path: Path,
) -> None:
    async with (
        servers(tmp_path, ["0:8"], *HASH, "--drain-timeout", "0.2") as (server,),
        fake_gateway([server]) as gateway,
    ):
        await session(gateway, credit=len(PROMPT) + 10)
        server.process.send_signal(signal.SIGTERM)
        assert await gone(server) == 0
        await gateway.received.until(lambda: bool(gateway.received.down))


@pytest.mark.full
async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with (
        servers(tmp_path, ["0:8"], *HASH, "--drain-timeout", "600") as (server,),
        fake_gateway([server]) as gateway,
    ):
        await session(gateway, credit=len(PROMPT) + 10)
        server.process.send_signal(signal.SIGTERM)
        await shut_down(gateway)
        server.process.send_signal(signal.SIGTERM)
        assert await gone(server) == 1


@pytest.mark.full
async def test_idle_and_orphaned_sessions_do_not_delay_exit(tmp_path: Path) -> None:
    async with (
        servers(tmp_path, ["0:8"], *HASH, "--drain-timeout", "600") as (server,),
        fake_gateway([server]) as gateway,
    ):
        route = await gateway.open("rests", len(PROMPT) + 3)
        await gateway.generate(route, PROMPT)
        async with fake_gateway([server], "gone/1/x") as other:
            await session(other, credit=len(PROMPT) + 10)
        server.process.send_signal(signal.SIGTERM)
        assert await gone(server) == 0
