"""A server whose model gives what no core can take: the process must end, so that its sessions find another."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from swarm.fake_gateway import fake_gateway
from swarm.servers import ServerProcess

from modelswarm_serving.health import Health
from modelswarm_serving.main import load
from modelswarm_serving.model.base import Result, Work
from modelswarm_serving.model.hash import HashModel
from modelswarm_serving.node import Node
from modelswarm_serving.settings import parse


class NothingModel(HashModel):
    def step(self, batch: Sequence[Work]) -> list[Result]:
        return cast("list[Result]", [None] * len(batch))


async def test_a_fault_in_the_middle_of_a_step_ends_the_process(tmp_path: Path) -> None:
    flags = ["--members", str(tmp_path), "--name", "s0", "--blocks", "0:4", "--hash-model"]
    settings = parse([*flags, "--hash-blocks", "4"])
    loaded = load(settings)
    model, health = NothingModel(loaded.model.shape), Health(time.monotonic)
    node = asyncio.create_task(Node(settings, model, loaded.files, loaded.revision, health).run())
    file = tmp_path / "s0.json"
    async with asyncio.timeout(10):
        while not file.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    server = ServerProcess(json.loads(file.read_text()), cast("Any", None), file)
    async with fake_gateway([server]) as gateway:
        route = await gateway.open("one", 20)
        asking = asyncio.create_task(gateway.generate(route, [1, 2, 3]))
        with pytest.raises(AttributeError):
            await asyncio.wait_for(node, 10)
        asking.cancel()
    assert not file.exists()
