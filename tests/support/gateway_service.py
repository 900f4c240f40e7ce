"""The generation service of a gateway in this process: a real node, linked to no server or to one that says nothing."""

from __future__ import annotations

import asyncio

from modelswarm_gateway.generation.service import GenerationService
from modelswarm_gateway.metrics.counters import Metrics
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import BLOCKS, make_hello, make_node


def make_service() -> tuple[GenerationService, Node]:
    """Return a service without a model, and its node. Needs a running event loop."""
    node = make_node()
    node.discover_servers()
    service = GenerationService(node, Metrics(node), asyncio.get_running_loop().time)
    return service, node


def make_service_with_model() -> tuple[GenerationService, Node]:
    """Return a service that knows the model MODEL; its tokenizer is not loaded."""
    service, node = make_service()
    node.on_link_up("s0/1/x", make_hello("s0", 0, BLOCKS))
    return service, node
