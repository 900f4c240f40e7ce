"""Embeddings, norm and head that the client loads give what the whole model of transformers gives, in every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.tiny_models import FUSED, GENERIC, load_whole, make_model
from transformers import GenerationConfig

from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.client.hf.auto import DistributedLlamaForCausalLM
from modelswarm.client.hf.blocks import RUN_BLOCKS, Blocks, load_local_modules
from modelswarm.client.sessions.connection import ServedModel
from modelswarm.errors import ModelSourceError

FAST = ("llama", "gpt2")
IDS = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])


@pytest.mark.parametrize(
    "family",
    [
        name if name in FAST else pytest.param(name, marks=pytest.mark.full)
        for name in (*FUSED, *GENERIC)
    ],
)
@torch.no_grad()
def test_modules_around_the_blocks_are_those_of_the_family(tmp_path: Path, family: str) -> None:
    whole: Any = load_whole(make_model(tmp_path, family))
    tables = FAMILIES[whole.config.get_text_config().model_type].tables
    before_norm: list[Any] = []
    norm = whole.get_submodule(tables.norm[0].rpartition(".")[0])
    norm.register_forward_pre_hook(lambda _, given: before_norm.append(given[0]))
    right = whole(IDS, output_hidden_states=True)
    entered: list[Any] = []

    def run(hidden: Any) -> Any:
        entered.append(hidden)
        return before_norm[0]

    local = load_local_modules(str(tmp_path), whole.config, torch.float32, {})
    token = RUN_BLOCKS.set(run)
    try:
        logits = local(IDS, use_cache=False).logits
        embedded = local.get_input_embeddings()(IDS)  # as for soft prompts
        given = {"attention_mask": torch.ones_like(IDS), "use_cache": False}
        again = local(inputs_embeds=embedded, **given).logits
    finally:
        RUN_BLOCKS.reset(token)
    assert torch.equal(entered[0], right.hidden_states[0])
    assert torch.equal(entered[1], right.hidden_states[0])
    assert torch.equal(logits, right.logits) and torch.equal(again, right.logits)


@pytest.mark.parametrize("is_on_hub", [False, True])
def test_missing_weights_are_refused_with_the_cure(tmp_path: Path, is_on_hub: bool) -> None:
    """The hub is not asked: only its cache is looked at."""
    config = load_whole(make_model(tmp_path / "model")).config
    (tmp_path / "empty").mkdir()
    model = "modelswarm/no-such-model" if is_on_hub else str(tmp_path / "empty")
    options = {"local_files_only": True, "cache_dir": str(tmp_path)} if is_on_hub else {}
    with pytest.raises(ModelSourceError, match=r"are not fetched from a gateway; give from_pretr"):
        load_local_modules(model, config, torch.float32, options)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_local_modules_follow_the_model_to_a_device(tmp_path: Path, is_loaded: bool) -> None:
    """Ids on an accelerator need their embeddings there."""
    config: Any = load_whole(make_model(tmp_path)).config
    served = ServedModel("m", 100, 2, config.hidden_size, "float32", vocab_size=config.vocab_size)
    connection: Any = None
    blocks = Blocks(connection, served, str(tmp_path), config, {})
    plain: Any = GenerationConfig
    model = DistributedLlamaForCausalLM(config, plain(), connection, served, blocks)
    if is_loaded:
        assert model.get_input_embeddings().weight.device.type == "cpu"
    model.to("meta")
    assert model.get_input_embeddings().weight.device.type == "meta"
    assert model.get_output_embeddings().weight.dtype == torch.float32
