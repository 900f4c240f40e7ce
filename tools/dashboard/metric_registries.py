"""The metric registries of all three processes just after their start: a server, a gateway linked to it, an operator.

Used by the metrics page, the dashboard's tests and `metrics_cost`. Opens no connection.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from modelswarm.protocol.identity import Address
from modelswarm.protocol.messages import PROTOCOL_VERSION, Heartbeat, Hello, Lane, Role
from modelswarm_gateway.core.interface.settings import GatewaySettings
from modelswarm_gateway.discovery.file_source import FileSource
from modelswarm_gateway.discovery.kubernetes_source import KubernetesSource
from modelswarm_gateway.metrics.collectors import PodCollector
from modelswarm_gateway.metrics.counters import Metrics as GatewayMetrics
from modelswarm_gateway.runtime.node import Node
from modelswarm_operator.observability.metrics import Metrics as OperatorMetrics
from modelswarm_serving.core.server import ServerCore
from modelswarm_serving.core.settings import ServerSettings
from modelswarm_serving.metrics import Metrics as ServerMetrics
from modelswarm_serving.model.base import Compute, ModelShape

MODEL, BLOCKS = "counting", 8


def make_hello(
    name: str, first: int, last: int, model: str = MODEL, n_blocks: int = BLOCKS
) -> Hello:
    """Return the Hello of a server."""
    return Hello(
        PROTOCOL_VERSION,
        f"{name}/1/x",
        Role.SERVER,
        link="link",
        lane=Lane.LIVE,
        target="127.0.0.1:1",
        model=model,
        revision="1",
        first=first,
        last=last,
        n_blocks=n_blocks,
        dtype="float32",
        row_bytes=8,
        max_length=64,
        total_pages=10,
        page_size=16,
    )


def make_node() -> Node:
    """Return a gateway's node without servers. Needs a running event loop."""
    no_servers = FileSource(Path("there-is-no-such-folder"))
    return Node("gateway/1/x", 1, no_servers, GatewaySettings(), lambda: 0.0, lambda: 0.0)


async def gateway_registry(*, vllm_names: bool = False) -> CollectorRegistry:
    node = make_node()
    metrics = GatewayMetrics(node, vllm_names=vllm_names)
    node.on_link_up("s0/1/x", make_hello("s0", 0, BLOCKS))
    node.on_items("s0/1/x", [Heartbeat(free_pages=10, total_pages=10)])
    metrics.registry.register(
        PodCollector(KubernetesSource(None, ("default",), lambda: 0.0, lambda: 0.0))
    )
    return metrics.registry


def server_registry() -> CollectorRegistry:
    shape = ModelShape(0, 4, BLOCKS, 8, 16, 10, 64, 256)
    metrics = ServerMetrics(MODEL, shape, Compute(layout_seconds={"packed": {1: 0.01}}))
    core = ServerCore(ServerSettings(Address("s0/1/x", "")), shape, lambda: 1)
    metrics.set_stats(core.stats)
    return metrics.registry


def operator_registry() -> CollectorRegistry:
    metrics = OperatorMetrics()
    metrics.record_api_call("GET", "/api/v1/pods", 200, 0.01)
    return metrics.registry


def metric_families(registry: CollectorRegistry) -> list[Metric]:
    return sorted(registry.collect(), key=lambda family: family.name)


def exposed_name(family: Metric) -> str:
    """Return the name as queries use it; a histogram without its `_bucket`, `_sum` and `_count`."""
    return f"{family.name}_total" if family.type == "counter" else family.name


def label_names(family: Metric) -> list[str]:
    names = {name for sample in family.samples for name in sample.labels}
    return sorted(names - {"le"})
