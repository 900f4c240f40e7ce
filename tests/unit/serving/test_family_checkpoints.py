"""Checkpoints of families with experts or own names: inspection and server refuse them with the same sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.models.tiny_models import make_model

from modelswarm.checkpoint.facts import read_facts
from modelswarm.checkpoint.inspection import inspect_model
from modelswarm.errors import ModelSourceError
from modelswarm_serving.model.transformer.startup import load_span

EXPERT = "model.layers.{}.block_sparse_moe.experts.{}.w2.weight"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mixtral"), "mixtral", blocks=2, shard_size="1GB")


@pytest.fixture
def copy(mixtral: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixtral, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refusal(folder: Path) -> str:
    """Return the sentence of a server at its start, which is that of the inspection too."""
    with pytest.raises(ModelSourceError) as server:
        load_span(folder, 0, 2)
    with pytest.raises(ModelSourceError) as inspection:
        inspect_model(f"file://{folder}")
    assert str(server.value) == str(inspection.value)
    return str(server.value)


def test_expert_missing_from_the_files_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors[EXPERT.format(1, 2)]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    assert refusal(copy) == f"model: {copy} has no weights for {EXPERT.format(1, 2)}"


def test_more_experts_than_the_files_hold_are_refused(copy: Path) -> None:
    change_config(copy, num_local_experts=5)
    assert refusal(copy) == (
        f"model: {copy}: model.layers.0.block_sparse_moe.gate.weight in model.safetensors has shape "
        "[4, 64], but config.json says [num_local_experts 5, hidden_size 64]"
    )


def test_fewer_experts_than_the_files_hold_are_refused(copy: Path) -> None:
    change_config(copy, num_local_experts=3)
    name = "model.layers.0.block_sparse_moe.experts.3.w1.weight"
    assert refusal(copy) == (
        f"model: {copy}: {name} in model.safetensors is no tensor of a mixtral model with this config.json"
    )


def test_more_picked_experts_than_experts_are_refused(copy: Path) -> None:
    change_config(copy, num_experts_per_tok=5)
    assert refusal(copy) == (
        f"model: {copy}/config.json: num_experts_per_tok is 5; allowed are at most num_local_experts, 4"
    )


def test_linear_attention_among_experts_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen3_moe", blocks=2)
    change_config(tmp_path, layer_types=["full_attention", "linear_attention"])
    assert refusal(tmp_path) == (
        f"model: {tmp_path}/config.json: layer_types is 'linear_attention'; "
        "allowed are full_attention, sliding_attention"
    )


def test_blocks_with_and_without_experts_differ(tmp_path: Path) -> None:
    make_model(tmp_path, "qwen2_moe", blocks=2, shard_size="1GB")
    tensors = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.weight" in tensors
    assert "model.layers.1.mlp.experts.0.up_proj.weight" in tensors
    assert read_facts(tmp_path, (0, 1)).block_elements == read_facts(tmp_path).block_elements
    change_config(tmp_path, decoder_sparse_step=1)
    name = "model.layers.0.mlp.down_proj.weight"
    assert refusal(tmp_path) == (
        f"model: {tmp_path}: {name} in model.safetensors is no tensor of a qwen2_moe model with this "
        "config.json"
    )
