"""Adapters that would be applied in another way than peft does are refused, before any weight is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.adapters import make_adapter
from support.models.chain import OPTIONS
from support.models.tiny_models import make_model

from modelswarm.checkpoint.config.adapter_config import read_adapter
from modelswarm.checkpoint.facts import read_config_and_plan
from modelswarm.errors import UserError
from modelswarm_serving.model.transformer.startup import load_span, plan_shape

NAME = "base_model.model.model.layers.1.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def good(model: Path) -> Path:
    return make_adapter(model, model / "good")


def changed(good: Path, folder: Path, **fields: Any) -> Path:
    shutil.copytree(good, folder)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **fields}))
    return folder


def refusal(model: Path, adapter: Path, **options: Any) -> str:
    wanted = replace(OPTIONS, adapters={"law": adapter}, **options)
    with pytest.raises(UserError) as caught:
        plan_shape(model, 0, 4, wanted)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; allowed: 'LORA'"),
        ({"use_dora": True}, "use_dora is True; this server does not do it"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']; this server does not"),
        ({"bias": "all"}, "bias is 'all'; allowed: 'none'"),
        ({"lora_bias": True}, "lora_bias is True; this server does not do it"),
        ({"init_lora_weights": "pissa"}, "it changes the model's own weights"),
        ({"r": 0}, "r is 0; allowed is a positive integer"),
        ({"lora_alpha": "many"}, "lora_alpha is 'many'; allowed are numbers"),
        ({"r": 8}, "has lora_A [4, 96] and lora_B [64, 4]; allowed: [8, 96] and [64, 8]"),
        ({"alpha_pattern": {"(": 3}}, "has a pattern that is malformed"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow is 1; this server does not do it"),
    ],
)
def test_field_without_effect_is_refused(
    model: Path, good: Path, tmp_path: Path, fields: dict[str, Any], sentence: str
) -> None:
    said = refusal(model, changed(good, tmp_path / "adapter", **fields))
    assert said.startswith("adapters: law: ") and sentence in said


def _drop(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[NAME.format("B")]


def _drop_both(tensors: dict[str, torch.Tensor]) -> None:
    for part in "AB":
        del tensors[NAME.format(part)]


def _widen(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME.format("A")] = torch.zeros(4, 128)


def _add_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = torch.zeros(4, 320)


def _add_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 64)


def _add_norm(tensors: dict[str, torch.Tensor]) -> None:
    name = "base_model.model.model.layers.0.input_layernorm.lora_{}.weight"
    tensors[name.format("A")] = tensors[name.format("B")] = torch.zeros(4, 64)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_drop, "lacks lora_B of self_attn.q_proj of block 1"),
        (_drop_both, "has no tensors for self_attn.q_proj of block 1"),
        (_widen, "has lora_A [4, 128] and lora_B [64, 4]; allowed: [4, 64] and [64, 4]"),
        (_add_embedding, "has base_model.model.model.embed_tokens.lora_embedding_A; allowed"),
        (_add_head, "has base_model.model.lm_head.lora_A.weight; allowed"),
        (_add_norm, "input_layernorm of block 0 cannot have an adapter; allowed: mlp.down_proj"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    model: Path,
    good: Path,
    tmp_path: Path,
    change: Callable[[dict[str, torch.Tensor]], None],
    sentence: str,
) -> None:
    folder = changed(good, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file({k: v.clone() for k, v in tensors.items()}, folder / "adapter_model.safetensors")
    assert sentence in refusal(model, folder)


@pytest.mark.parametrize(("layers", "is_refused"), [([1, 3], True), (1, True), ([0, 3], False)])
def test_missing_tensors_of_listed_layers_are_refused(
    model: Path, good: Path, tmp_path: Path, layers: int | list[int], is_refused: bool
) -> None:
    folder = changed(good, tmp_path / "adapter", layers_to_transform=layers)
    tensors = load_file(folder / "adapter_model.safetensors")
    _drop_both(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    if is_refused:
        assert "has no tensors for self_attn.q_proj of block 1" in refusal(model, folder)
    else:
        plan_shape(model, 0, 4, replace(OPTIONS, adapters={"law": folder}))


def test_patterns_name_modules_as_peft_has_them(tmp_path: Path) -> None:
    """Gemma 3 with images has its blocks in `model.language_model`, so patterns with whole names say that too."""
    text = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
    config = {"model_type": "gemma3", "text_config": {**text, "head_dim": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    nested = "model.language_model.layers.0.self_attn.q_proj"
    name = f"base_model.model.{nested}.lora_{{}}.weight"
    tensors = {name.format("A"): torch.zeros(2, 64), name.format("B"): torch.zeros(64, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    patterns = {"rank_pattern": {nested: 2}, "alpha_pattern": {nested: 6}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(fields | patterns))
    facts, plan = read_config_and_plan(tmp_path)
    [found] = read_adapter("law", tmp_path, plan, facts.all_blocks, 16).projections
    assert (found.rank, found.scale) == (2, 3.0)


def test_rank_above_the_limit_is_refused(model: Path, good: Path) -> None:
    assert "has rank 4; allowed: at most 2" in refusal(model, good, max_lora_rank=2)


def test_adapter_of_another_model_is_refused(good: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "wide", hidden_size=96)
    assert "by the model and r" in refusal(other, good)


def test_folder_without_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    assert "has no adapter_config.json" in refusal(model, tmp_path)


def test_numbers_that_are_not_finite_are_refused(model: Path, good: Path, tmp_path: Path) -> None:
    folder = changed(good, tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[NAME.format("A")] = torch.full((4, 64), float("nan"))
    save_file(tensors, folder / "adapter_model.safetensors")
    options = replace(OPTIONS, adapters={"law": folder})
    with pytest.raises(UserError, match="has values that are not finite"):
        load_span(model, 0, 4, options)


def test_weight_without_its_own_forward_cannot_have_an_adapter(tmp_path: Path) -> None:
    """The latent attention reads the weight of kv_b_proj, so an adapter there would be left out."""
    model = make_model(tmp_path / "deepseek", "deepseek_v3")
    adapter = make_adapter(model, tmp_path / "adapter", target_modules=["self_attn.kv_b_proj"])
    options = replace(OPTIONS, adapters={"law": adapter})
    with pytest.raises(UserError, match="kv_b_proj of block 0 of the span cannot have an adapter"):
        load_span(model, 0, 4, options)


def test_adapters_count_in_the_memory_of_a_server(model: Path, good: Path) -> None:
    """The pages take what is left, so a server with adapters has fewer."""
    sized = replace(OPTIONS, pages=None, memory=1200 << 20, max_lora_rank=512)
    plain, _ = plan_shape(model, 0, 4, sized)
    named, _ = plan_shape(model, 0, 4, replace(sized, adapters={"law": good, "tax": good}))
    assert named.total_pages < plain.total_pages
