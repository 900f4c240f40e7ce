"""A server's node with unusual models: one returns invalid results, one has steps of constant time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from support.processes.fake_gateway import FakeGateway, fake_gateway
from support.processes.link_peers import DEADLINE
from support.processes.server import ServerProcess
from typing_extensions import override

from modelswarm.protocol.messages import Heartbeat
from modelswarm_serving.app import load
from modelswarm_serving.model.base import Result, Task
from modelswarm_serving.model.hash_model import HashModel
from modelswarm_serving.runtime.liveness import Liveness
from modelswarm_serving.runtime.node import Node
from modelswarm_serving.settings import parse_settings


class NothingModel(HashModel):
    @override
    def step(self, batch: Sequence[Task]) -> list[Result]:
        return cast("list[Result]", [None] * len(batch))


class EvenModel(HashModel):
    """A model with a token every few milliseconds."""

    @override
    def step(self, batch: Sequence[Task]) -> list[Result]:
        time.sleep(0.005)
        return super().step(batch)


@contextlib.asynccontextmanager
async def served(
    folder: Path, model: type[HashModel]
) -> AsyncIterator[tuple[asyncio.Task[None], FakeGateway]]:
    """Yield a server in this process that holds all blocks of such a model, and a gateway linked to it."""
    flags = ["--discovery-dir", str(folder), "--name", "s0", "--blocks", "0:4", "--hash-model"]
    settings = parse_settings([*flags, "--hash-blocks", "4"])
    loaded = load(settings)
    with_model = replace(loaded, model=model(loaded.model.shape))
    shell = Node(settings, with_model, Liveness(time.monotonic))
    node = asyncio.create_task(shell.run())
    file = folder / "s0.json"
    try:
        async with asyncio.timeout(DEADLINE):
            while not file.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        server = ServerProcess(json.loads(file.read_text()), cast("Any", None), file)
        async with fake_gateway([server]) as gateway:
            yield node, gateway
    finally:
        node.cancel()
        with contextlib.suppress(asyncio.CancelledError, AttributeError):
            await node


async def test_error_in_a_step_ends_the_process(tmp_path: Path) -> None:
    """A server that fails in a step exits, so that its sessions move to another server."""
    async with served(tmp_path, NothingModel) as (node, gateway):
        route = await gateway.open("one", 20)
        asking = asyncio.create_task(gateway.generate(route, [1, 2, 3]))
        with pytest.raises(AttributeError):
            await asyncio.wait_for(node, DEADLINE)
        asking.cancel()
        assert not (tmp_path / "s0.json").exists()


async def test_busy_tail_sends_heartbeats_while_tokens_flow(tmp_path: Path) -> None:
    async with served(tmp_path, EvenModel) as (_, gateway):
        route = await gateway.open("one", 303)
        await gateway.generate(route, [1, 2, 3])
        heartbeats = [
            item for item in gateway.of(Heartbeat) if isinstance(item, Heartbeat) and item.running
        ]
        assert len({heartbeat.steps for heartbeat in heartbeats}) >= 2, (
            "it ran for a second and a half"
        )
        assert all(heartbeat.free_pages < heartbeat.total_pages for heartbeat in heartbeats)
        assert heartbeats[-1].step_ms >= 5
