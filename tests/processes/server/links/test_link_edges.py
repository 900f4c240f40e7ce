"""Links at their edge cases: a handler that raises, an invalid address."""

from __future__ import annotations

import asyncio

import pytest
from support.ports import loopback_hosts
from support.processes.link_peers import DEADLINE, Node, hello, joined, nodes

from modelswarm.protocol.identity import Address, PeerId
from modelswarm.protocol.link.listener import open_call
from modelswarm.protocol.messages import Close, Heartbeat, Hello, Item

PORTS = ["127.0.0.1:70000", "localhost:70000", "127.0.0.1:-1", "127.0.0.1:0"]


@pytest.mark.parametrize("target", ["a\0b:1", "\ud800:1", "nowhere", *PORTS])
async def test_invalid_address_is_a_failed_dial(target: str) -> None:
    async with nodes("a") as [a]:
        a.links.dial(Address("b/1/x", target))
        await a.received.until(lambda: bool(a.received.down))
        assert a.received.down[0][0] == "b/1/x"
        assert "cannot be dialled" in a.received.down[0][1]
        with pytest.raises(ValueError, match="allowed: 1 to 65535" if target in PORTS else "."):
            async with open_call(target, "/a/Method"):
                pass
        a.links.dial(Address("b/1/x", target))  # a second dial is allowed
        await a.received.until(lambda: len(a.received.down) == 2)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "[::]"])
async def test_wildcard_listens_at_addresses_of_both_families(wildcard: str) -> None:
    hosts = ["localhost", *(f"[{host}]" for host in loopback_hosts())]
    async with nodes("a") as [a]:
        other = Node(hello("b/1/x"))
        port = (await other.links.listen(f"{wildcard}:0")).rpartition(":")[2]
        try:
            for number, host in enumerate(hosts, 1):
                a.links.dial(Address(other.peer, f"{host}:{port}"))
                await a.received.until(lambda n=number: len(a.received.up) == n)  # type: ignore[misc]
                a.links.unlink(other.peer, "enough")
                await a.received.until(lambda n=number: len(a.received.down) == n)  # type: ignore[misc]
                await other.received.until(lambda n=number: len(other.received.down) == n)  # type: ignore[misc]
        finally:
            await other.links.close()


async def test_failing_unlink_handler_leaves_no_task() -> None:
    async with nodes("a", "b") as [a, b]:
        before = len(asyncio.all_tasks())
        await joined(a, b)

        def fails(peer: PeerId, reason: str) -> None:
            raise RuntimeError("a fault of this process")

        a.received.on_link_down = fails  # type: ignore[method-assign]
        b.links.unlink(a.peer, "enough")
        await b.received.until(lambda: bool(b.received.down))
        async with asyncio.timeout(DEADLINE):
            while len(asyncio.all_tasks()) > before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        del a.received.on_link_down
        a.links.dial(b.address)
        await b.received.until(lambda: len(b.received.up) == 2)
        a.send(b.address, [Heartbeat(steps=7)])
        await b.received.until(lambda: Heartbeat(steps=7) in b.received.items)


async def test_failing_item_handler_ends_that_link_and_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with nodes("a", "b") as (a, b):
        await joined(a, b)

        def fail(peer: str, items: list[Item]) -> None:
            raise RuntimeError("a bug")

        b.received.hook = fail
        a.send(b.address, [Close(1)])
        await a.received.until(lambda: bool(a.received.down))
        await b.received.until(lambda: bool(b.received.down))
        assert any(record.exc_info for record in caplog.records)


async def test_failing_link_handler_ends_that_link() -> None:
    async with nodes("a", "b") as (a, b):

        def fail(peer: str, hello: Hello) -> None:
            raise RuntimeError("a bug")

        b.received.on_link_up = fail  # type: ignore[method-assign]
        a.links.dial(b.address)
        await a.received.until(lambda: bool(a.received.down))
        await b.received.until(lambda: bool(b.received.down))
