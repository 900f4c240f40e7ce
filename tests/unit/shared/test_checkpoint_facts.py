"""The facts of a model folder, and the error for each folder that cannot be used."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from support.models.tiny_models import TINY, VOCAB, load_whole, make_model, write_tokenizer
from tokenizers import Tokenizer
from transformers import AutoConfig

from modelswarm.checkpoint.facts import read_config, read_config_and_plan, read_facts
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.tensor_index import read_header, read_tensors
from modelswarm.checkpoint.tensor_names import block_of, canonical_name
from modelswarm.checkpoint.tokenizer import (
    MAX_SETTINGS_BYTES,
    MAX_TOKENIZER_BYTES,
    MAX_TOKENIZER_COMMAS,
    check_tokenizer,
)
from modelswarm.errors import ModelSourceError, UserError
from modelswarm_serving.model.base import KvRead
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("family", TINY)
def test_facts_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    make_model(tmp_path, family)
    facts = read_facts(tmp_path)
    config: Any = AutoConfig.from_pretrained(tmp_path)
    assert facts.config.family == family.removesuffix("_new")
    assert (facts.config.n_blocks, facts.config.hidden, facts.config.vocab) == (4, 64, VOCAB)
    assert facts.config.context == config.max_position_embeddings
    assert facts.config.tied == config.tie_word_embeddings
    sizes: Counter[int | None] = Counter()
    stored = load_whole(tmp_path).state_dict()
    for name, tensor in stored.items():
        sizes[block_of(name)] += tensor.numel()
    assert facts.block_elements == max(sizes[block] for block in range(4))
    for first, last in itertools.combinations(range(5), 2):
        held = [sizes[block] for block in range(first, last)]
        assert facts.span_elements(first, last) == sum(held)
        assert facts.largest_block(first, last) == max(held)
        tail = facts.embedding_elements if last == 4 else 0
        assert facts.read_bytes(first, last, "float32") == 4 * ((sum(held) + tail) // len(held))
    tables = {name: stored[name].numel() for name in facts.config.part(0, 1).table_names}
    norms = sum(size for name, size in tables.items() if "norm" in name)
    assert facts.embedding_elements == sum(tables.values()) - norms
    span = load_span(tmp_path, 1, 2, SpanOptions(threads=1, pages=3, page_size=4))
    pages = span.step([KvRead(range(3), 0, 12, (1, 2))])[0].rows
    assert pages is not None and len(pages) == 12 * facts.kv_bytes("float32")
    halves = facts.weight_bytes(0, 2, "float32") + facts.weight_bytes(2, 4, "float32")
    extra = facts.embedding_elements * 4 if facts.config.tied else 0
    assert halves == facts.weight_bytes(0, 4, "float32") + extra


def test_gemma_3_with_vision_tower_uses_its_text_config(tmp_path: Path) -> None:
    make_model(tmp_path, "gemma3")
    text = json.loads((tmp_path / "config.json").read_text())
    whole = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert read_config(tmp_path).n_blocks == 4


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"model: .*nothing is not a folder"):
        read_facts(tmp_path / "nothing")


def test_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"has no config.json"):
        read_facts(tmp_path)


def test_invalid_config_json_is_refused_with_its_place(copy: Path) -> None:
    (copy / "config.json").write_text('{"model_type": "llama",')
    with pytest.raises(ModelSourceError, match=r"config.json is not valid JSON: .*line 1"):
        read_facts(copy)
    (copy / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelSourceError, match=r"config.json is not valid JSON"):
        read_facts(copy)


def test_unsupported_family_is_refused_with_the_supported_ones(copy: Path) -> None:
    change_config(copy, model_type="mamba")
    allowed = (
        f"config.json: model_type is 'mamba'; allowed are {', '.join(sorted(FAMILIES))}; "
        "docs/reference/adding-a-model-family.md says how to add one"
    )
    with pytest.raises(ModelSourceError, match=allowed):
        read_facts(copy)


def test_missing_shard_is_named_only_for_spans_that_need_it(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    shard = index["model.layers.3.mlp.down_proj.weight"]
    (copy / shard).unlink()
    with pytest.raises(ModelSourceError, match=f"has no {shard}"):
        read_facts(copy)
    assert read_facts(copy, (0, 1)).config.n_blocks == 4


@pytest.mark.parametrize("kept", [4, 200, -100])
def test_truncated_shard_is_refused(copy: Path, kept: int) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:kept])
    with pytest.raises(ModelSourceError, match=rf"{shard.name} is truncated"):
        read_facts(copy)


def test_shard_other_than_safetensors_is_refused(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    shard.write_bytes((8).to_bytes(8, "little") + b"not json" + b"x" * 100)
    with pytest.raises(ModelSourceError, match=r"is not a safetensors file"):
        read_facts(copy)


def test_index_of_shards_that_one_file_replaced_is_ignored(copy: Path) -> None:
    """As save_pretrained leaves it in the folder of a sharded model."""
    facts = read_facts(copy)
    load_whole(copy).save_pretrained(copy, max_shard_size="1GB")
    files = {each.name for each in copy.glob("model*")}
    assert files == {"model.safetensors", "model.safetensors.index.json"}
    assert read_facts(copy) == facts


def test_old_copy_of_a_tensor_in_another_shard_is_not_read(copy: Path) -> None:
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    first, *others = sorted(set(index.values()))
    name = next(name for name, file in index.items() if file == first)
    for shard in others:
        tensors = load_file(copy / shard) | {name: torch.zeros(1)}
        save_file(tensors, copy / shard, {"format": "pt"})
    assert read_tensors(copy, lambda _: True)[name].file == first


def test_tensor_missing_from_the_index_is_named(copy: Path) -> None:
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if k != "lm_head.weight"}
    path.write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=r"no weights for lm_head.weight"):
        read_facts(copy)


@pytest.mark.parametrize("blocks", [(0, 5), (2, 2), (3, 1), (-1, 2)])
def test_block_range_outside_the_model_is_refused(folder: Path, blocks: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=r"blocks: .* is out of range: the model has blocks 0:4"):
        read_facts(folder, blocks)


def test_missing_or_invalid_tokenizer_is_refused(copy: Path) -> None:
    check_tokenizer(copy, VOCAB)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"tokenizer.json is not a tokenizer"):
        check_tokenizer(copy, VOCAB)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"has no tokenizer.json"):
        check_tokenizer(copy, VOCAB)


@pytest.mark.parametrize(
    ("name", "most"),
    [("tokenizer.json", MAX_TOKENIZER_BYTES), ("tokenizer_config.json", MAX_SETTINGS_BYTES)],
)
def test_tokenizer_file_no_gateway_takes_is_refused(copy: Path, name: str, most: int) -> None:
    with (copy / name).open("ab") as file:
        file.truncate(most + 1)
    with pytest.raises(
        ModelSourceError, match=rf"{name} has {most + 1} bytes; allowed: at most {most}"
    ):
        check_tokenizer(copy, VOCAB)


def test_tokenizer_of_too_many_entries_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_bytes(b"," * (MAX_TOKENIZER_COMMAS + 1))
    with pytest.raises(ModelSourceError, match=r"2097153 commas .* allowed: 2097152"):
        check_tokenizer(copy, VOCAB)


def test_tokenizer_larger_than_the_vocabulary_is_refused(copy: Path) -> None:
    write_tokenizer(copy, 200)
    check_tokenizer(copy, 200)
    with pytest.raises(
        ModelSourceError, match=r"vocab_size .* is 150, but .* has ids up to 199; allowed .* 200"
    ):
        check_tokenizer(copy, 150)


def test_special_tokens_behind_the_vocabulary_are_accepted(copy: Path) -> None:
    """As `<image_soft_token>` of the text-only Gemma 3 of 1B and 270M parameters."""
    write_tokenizer(copy, 200)
    path = str(copy / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<image>"])
    tokenizer.save(path)
    check_tokenizer(copy, 200)
    tokenizer.add_tokens(["usual"])
    tokenizer.save(path)
    with pytest.raises(ModelSourceError, match="has ids up to 201"):
        check_tokenizer(copy, 200)


@pytest.mark.parametrize(
    ("model_type", "field", "value"),
    [
        ("deepseek_v3", "first_k_dense_replace", "1"),
        ("deepseek_v3", "num_nextn_predict_layers", "x"),
        ("deepseek_v3", "n_routed_experts", 10**9),
        ("qwen3_moe", "decoder_sparse_step", "2"),
        ("qwen3_moe", "mlp_only_layers", 2),
        ("qwen3_moe", "num_experts", 10**9),
        ("llama", "max_position_embeddings", 2**53 + 1),
        ("llama", "rms_norm_eps", 10**400),
    ],
)
def test_value_of_another_kind_is_refused_by_its_field(
    tmp_path: Path, model_type: str, field: str, value: object
) -> None:
    write_config(tmp_path, model_type, **{field: value})
    with pytest.raises(ModelSourceError, match=rf"config.json: {field} is .*; allowed (is|are) "):
        read_config(tmp_path)


def test_missing_number_of_dense_blocks_is_the_default(tmp_path: Path) -> None:
    write_config(tmp_path, "deepseek_v3", first_k_dense_replace=None)
    assert read_config_and_plan(tmp_path)[1].sparse_blocks == {3}


def write_config(folder: Path, model_type: str, **changes: object) -> None:
    fields = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = json.dumps({"model_type": model_type, **fields, **changes})
    (folder / "config.json").write_text(text)


def test_number_of_a_block_beyond_any_model_is_no_block() -> None:
    assert canonical_name(f"model.layers.{'9' * 5000}.x") is None


HEADER = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'


@pytest.mark.parametrize(
    "text",
    [
        HEADER.encode("utf-8-sig"),
        HEADER.encode("utf-16"),
        HEADER.replace("[1]", "[1.0]").encode(),
        HEADER.replace("}}", '},"__metadata__":["x"]}').encode(),
        HEADER.replace("}}", '},"__metadata__":{"x":1}}').encode(),
    ],
)
def test_header_that_the_library_refuses_is_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(SafetensorError), safe_open(path, framework="pt"):
        pass
    with pytest.raises(ModelSourceError, match="is not a safetensors file"):
        read_header(tmp_path, path.name)


def test_facts_import_no_torch() -> None:
    """The images of the gateway and the operator contain no torch."""
    program = (
        "import sys; import modelswarm.checkpoint.facts, modelswarm.checkpoint.sources; "
        "assert not {'torch', 'huggingface_hub', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
