"""The generation service of a gateway in this process: a real node, linked to no server or to a silent one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from support.eventually import SECONDS

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import ModelFileChunk
from modelswarm_gateway.generation.service import GenerationService, ServiceSettings
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.models.registry import FILES
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import BLOCKS, make_hello, make_node


def make_service(tokenizer_seconds: float = 0.0) -> tuple[GenerationService, Node]:
    """Return a service without a model, and its node. Needs a running event loop.

    `tokenizer_seconds`: time for which a request waits while a tokenizer is loaded.
    """
    node = make_node()
    node.discover_servers()
    settings = ServiceSettings(tokenizer_seconds=tokenizer_seconds)
    service = GenerationService(node, Metrics(node), asyncio.get_running_loop().time, settings)
    return service, node


def make_service_with_model(tokenizer_seconds: float = 0.0) -> tuple[GenerationService, Node]:
    """Return a service that knows the model MODEL; its tokenizer is not loaded."""
    service, node = make_service(tokenizer_seconds)
    node.on_link_up("s0/1/x", make_hello("s0", 0, BLOCKS))
    return service, node


async def make_service_with_files(files: dict[str, bytes]) -> tuple[GenerationService, Node]:
    """Return a service that has these files of the model MODEL; its only server sends nothing else."""
    service, node = make_service_with_model()
    send_files(node, files)
    async with asyncio.timeout(SECONDS):
        while not any(  # noqa: ASYNC110 (the registry has no event for it)
            card.tokenizer or card.files_problem for card in node.model_cards()
        ):
            await asyncio.sleep(0.01)
    return service, node


def send_files(node: Node, files: dict[str, bytes], server: PeerId = "s0/1/x") -> None:
    """Let the server send these files of the model, and say that it has no others."""
    for name in FILES:
        content = files.get(name)
        chunk = ModelFileChunk(
            name, 0, len(content or b""), content or b"", missing=content is None
        )
        node.on_items(server, [chunk])


async def turns_of_another_task(work: Awaitable[None]) -> int:
    """Return how often another task of the loop has its turn until the work is done."""
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(count_turns())
    await work
    other.cancel()
    return turns
