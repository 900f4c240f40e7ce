"""The classes of families on real swarms: `generate`, sessions and blocks equal the whole model of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import torch
from support.models.tiny_models import load_whole, make_model, nest_as_gemma_3
from support.processes.swarm import running_swarm

import modelswarm

pytestmark = pytest.mark.full
BLOCKS = {
    "gpt2": "transformer.h",
    "gpt_neox": "gpt_neox.layers",
    "falcon": "transformer.h",
    "falcon_new": "transformer.h",
    "opt": "model.decoder.layers",
    "mixtral": "model.layers",
    "granite": "model.layers",
    "gpt_oss": "model.layers",
    "deepseek_v3": "model.layers",
    "gemma3": "model.layers",
    "gemma3_images": "model.layers",
}
"""Families of every kind -> the name of their blocks. The last has the names and files of the model with images."""
IDS = torch.tensor([[65, 12, 200, 7, 9, 31, 8, 100, 33, 5], [90, 91, 92, 93, 94, 95, 96, 97, 7, 1]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10])
ANSWER: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}


class Pair(NamedTuple):
    ours: Any
    whole: Any  # of transformers
    blocks: str  # name of the blocks


@pytest.fixture(scope="module", params=BLOCKS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    torch.set_num_threads(1)
    name = request.param
    folder = served = make_model(tmp_path_factory.mktemp(name), name.removesuffix("_images"))
    whole = load_whole(folder)
    kind = type(whole).__name__
    if name == "gemma3_images":
        served, kind = folder.with_name("nested"), "Gemma3ForConditionalGeneration"
        nest_as_gemma_3(folder, served)
    with running_swarm(served, name.replace("_", "-"), spans=2, length=512) as running:
        found = getattr(modelswarm, f"Distributed{kind}")
        yield Pair(found.from_pretrained(served, gateway=running.local.grpc), whole, BLOCKS[name])


def close(one: Any, other: Any) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=1e-3, atol=1e-3)


def test_generate_gives_the_tokens_of_the_whole_model(pair: Pair) -> None:
    """Plain, padded, on logits at the client, and by turns of a session."""
    right = pair.whole.generate(IDS, **ANSWER)
    assert pair.ours.generate(IDS, **ANSWER).equal(right)
    for wanted in ({"attention_mask": MASK}, {"num_beams": 2}):
        found = pair.ours.generate(IDS, **ANSWER, **wanted)
        assert found.equal(pair.whole.generate(IDS, **ANSWER, **wanted)), wanted
    with pair.ours.inference_session(max_length=22, batch_size=2):
        half = ANSWER | {"max_new_tokens": 6}
        assert pair.ours.generate(IDS, **half).equal(right[:, :16])
        assert pair.ours.generate(None, **half).equal(right[:, 16:])


@torch.no_grad()
def test_blocks_give_the_states_of_the_whole_model(pair: Pair) -> None:
    """Two servers have two blocks each. Embeddings, norm and head are those of the client."""
    right = pair.whole(IDS, output_hidden_states=True)
    layers = attrgetter(pair.blocks)(pair.ours)
    assert len(layers) == 4
    for first, last in ((0, 3), (1, 3), (2, 3)):
        assert close(layers[first:last](right.hidden_states[first]), right.hidden_states[last])
    assert close(pair.ours(IDS).logits, right.logits)
    ours = pair.ours(IDS, output_hidden_states=True)
    assert close(ours.logits, right.logits)
    assert all(map(close, ours.hidden_states, right.hidden_states))
