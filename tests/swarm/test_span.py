"""Spans compute what transformers computes with the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from swarm.chain import Chain, Stream, load_chain
from swarm.models import BLOCKS, EOS, FAMILIES, VOCAB, load_whole, make_model
from transformers import PreTrainedModel

SPLITS = ((0, 4), (0, 2, 4), (0, 1, 2, 3, 4))
PROMPTS = (13, 5, 21, 1, 33, 8, 2, 17)
NEW = 16


@pytest.fixture(scope="module", params=FAMILIES)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    family = str(request.param)
    return make_model(tmp_path_factory.mktemp(family), family)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]


def reference(model: PreTrainedModel, prompt: list[int], count: int = NEW) -> list[int]:
    """Greedy `generate` of transformers: prompt and what follows, without what comes after the end."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=EOS
    )
    tokens: list[int] = out[0].tolist()
    return tokens


def test_greedy_tokens_equal_transformers_for_every_family_and_split(family_folder: Path) -> None:
    model = load_whole(family_folder)
    expected = [reference(model, prompt) for prompt in prompts()]
    for cuts in SPLITS:
        chain = load_chain(family_folder, cuts)
        alone = Stream(prompts()[0])
        chain.generate([alone], NEW, eos=EOS)
        assert alone.log == expected[0], cuts
        streams = [Stream(prompt) for prompt in prompts()]
        chain.generate(streams, NEW, eos=EOS)
        assert [stream.log for stream in streams] == expected, cuts
        assert chain.spans[-1].shape.n_blocks == BLOCKS


def test_chunked_prefill_and_scattered_pages_change_no_token(family_folder: Path) -> None:
    expected = [reference(load_whole(family_folder), prompt) for prompt in prompts()]
    chain: Chain = load_chain(family_folder, (0, 2, 4), seed=3)
    for chunk in (7, 16):
        streams = [Stream(prompt) for prompt in prompts()]
        chain.generate(streams, NEW, chunk=chunk, eos=EOS)
        assert [stream.log for stream in streams] == expected, chunk
