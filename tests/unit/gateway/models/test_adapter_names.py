"""Two models have an adapter of one name, by mistake: its requests stay with the model that can answer them."""

from __future__ import annotations

from dataclasses import replace

from support.gateway_service import make_service_with_files
from support.models.tokenizers import model_files

from modelswarm.protocol.identity import Adapter
from modelswarm.protocol.messages import Hello
from modelswarm_gateway.runtime.node import Node
from tools.dashboard.metric_registries import BLOCKS, MODEL, make_hello

LAW = (Adapter("law", "1" * 16),)
HALF = BLOCKS // 2


def other(name: str, first: int, last: int) -> Hello:
    hello = make_hello(name, first, last, model="other")
    return replace(hello, revision="2", adapters=(Adapter("law", "2" * 16),))


def parent_of_law(node: Node) -> str:
    card = node.model_card("law")
    assert card is not None
    assert card.missing_blocks == () and card.tokenizer is not None
    return card.parent


async def test_adapter_stays_with_the_model_whose_servers_are_whole() -> None:
    _, node = await make_service_with_files(model_files())
    node.on_link_up("s0/1/x", replace(make_hello("s0", 0, BLOCKS), adapters=LAW))
    assert parent_of_law(node) == MODEL
    node.on_link_up("t0/1/x", other("t0", 0, HALF))
    assert parent_of_law(node) == MODEL, "the other model lacks blocks"
    for name, first, last in (("t1", HALF, BLOCKS), ("t2", 0, HALF)):
        node.on_link_up(f"{name}/1/x", other(name, first, last))
    assert parent_of_law(node) == MODEL, "the other model has no tokenizer yet"
