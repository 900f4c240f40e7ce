"""Checkpoints of families with experts or own names: inspection and server refuse them with the same sentence."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.chain import Stream, load_chain
from support.models.tiny_models import load_whole, make_model
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from modelswarm.checkpoint.block_tensors import PACKED, SCALES
from modelswarm.checkpoint.facts import read_config, read_facts
from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.checkpoint.inspection import inspect_model
from modelswarm.errors import ModelSourceError, UserError
from modelswarm_serving.model.transformer.loading import load_modules
from modelswarm_serving.model.transformer.mxfp4 import unpack_mxfp4
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

TABLES = {name: family.tables for name, family in FAMILIES.items()}
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


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("falcon", {"alibi": True}, "alibi is True; allowed is false"),
        (
            "opt",
            {"word_embed_proj_dim": 32},
            "word_embed_proj_dim is 32; allowed is hidden_size, 64",
        ),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before is False; allowed is true"),
        ("gpt2", {"n_head": 5}, "n_head is 5; allowed are divisors of n_embd, 64"),
        (
            "phi3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
            "rope_scaling.rope_type is 'longrope'; allowed are default, linear, llama3, yarn",
        ),
        (
            "deepseek_v3",
            {"quantization_config": {"quant_method": "fp8"}},
            (
                "quantization_config.quant_method is 'fp8'; quantised checkpoints are not served, "
                "allowed are weights in float32, bfloat16 or float16"
            ),
        ),
        (
            "mistral",
            {"layer_types": ["full_attention", "sliding_attention"]},
            (
                "layer_types is ['full_attention', 'sliding_attention']; allowed is none, "
                "as transformers runs such a model as one of another family"
            ),
        ),
        (
            "llama",
            {"sliding_window": 12},
            "sliding_window is 12; allowed is null, as no block of this family has a window",
        ),
        (
            "granite",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is 'sliding_attention'; allowed are full_attention",
        ),
        ("llama", {"auto_map": None}, "auto_map is None; allowed is an object"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0; allowed is a number above 0"),
        ("gpt_neox", {"rotary_pct": 1.5}, "rotary_pct is 1.5; allowed is a number from 0 to 1"),
        (
            "glm4",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 7}},
            "rope_parameters.partial_rotary_factor is 7; allowed is a number from 0 to 1",
        ),
        (
            "deepseek_v3",
            {"n_group": 8},
            "n_group is 8; allowed are divisors of n_routed_experts, 8, with at least 2 in a group",
        ),
        ("deepseek_v3", {"topk_group": 3}, "topk_group is 3; allowed are at most n_group, 2"),
        (
            "deepseek_v2",
            {"topk_method": "group_limited_greedy", "n_group": 3},
            "n_group is 3; allowed are divisors of n_routed_experts, 4, with at least 1 in a group",
        ),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; allowed is 'greedy' or 'group_limited_greedy'",
        ),
    ],
)
def test_parts_of_families_that_are_not_served_are_named(
    tmp_path: Path, family: str, changes: dict[str, Any], sentence: str
) -> None:
    make_model(tmp_path, family, blocks=2)
    change_config(tmp_path, **changes)
    assert refusal(tmp_path) == f"model: {tmp_path}/config.json: {sentence}"


def test_fault_of_the_models_own_forward_is_one_sentence(tmp_path: Path) -> None:
    """transformers reads some values first while it computes."""
    make_model(tmp_path, "deepseek_v2", blocks=2)
    change_config(tmp_path, topk_method=None)
    with pytest.raises(ModelSourceError, match="its blocks fail: UnboundLocalError: "):
        load_span(tmp_path, 0, 2)


@pytest.mark.parametrize("family", ["llama", "olmo2"])  # fused, and transformers' own forward
def test_outputs_beyond_the_format_are_refused(tmp_path: Path, family: str) -> None:
    """A server of such a model would start, and refuse each request."""
    make_model(tmp_path, family, blocks=2, shard_size="1GB")
    path = tmp_path / "model.safetensors"
    scaled = {n: t * (1e6 if "down_proj" in n else 1) for n, t in load_file(path).items()}
    save_file(scaled, path, {"format": "pt"})
    with pytest.raises(UserError, match="the model's outputs are not finite in float16; allowed:"):
        load_span(tmp_path, 0, 2, SpanOptions(dtype="float16"))
    load_span(tmp_path, 0, 2, SpanOptions(dtype="bfloat16"))


def test_converted_experts_are_read_one_after_another(mixtral: Path, copy: Path) -> None:
    """Threads of transformers read ahead without bound, and would hold the experts of all blocks twice."""
    path = copy / "model.safetensors"
    halves = {name: each.bfloat16() for name, each in load_file(path).items()}
    save_file(halves, path, {"format": "pt"})

    def readers(folder: Path) -> set[int]:
        found: set[int] = set()
        load_modules(
            folder,
            read_config(folder).all_blocks,
            torch.float32,
            torch.device("cpu"),
            lambda done, total: found.add(threading.get_ident()),
        )
        return found

    assert readers(copy) == {threading.get_ident()}
    assert readers(mixtral) > {threading.get_ident()}  # nothing is converted


def test_window_that_the_model_says_it_does_not_use_is_served(tmp_path: Path) -> None:
    """As checkpoints of Qwen whose names and fields were changed to those of Llama have it."""
    make_model(tmp_path, "llama", blocks=2)
    expected = tokens_of(tmp_path)
    change_config(tmp_path, sliding_window=4, use_sliding_window=False)
    assert tokens_of(tmp_path) == expected


def test_sliding_blocks_without_a_window_are_refused(tmp_path: Path) -> None:
    """transformers gives such blocks of Qwen2-MoE a window of 0, in which no key is seen."""
    make_model(tmp_path, "qwen2_moe", blocks=2)
    change_config(tmp_path, use_sliding_window=False, layer_types=["sliding_attention"] * 2)
    with pytest.raises(ModelSourceError, match="it attends with a window of 0"):
        load_span(tmp_path, 0, 2)


def tokens_of(folder: Path) -> list[int]:
    stream = Stream([3, 14, 15, 92])
    load_chain(folder, (0, 1, 2)).generate([stream], 8)
    return stream.log


@pytest.mark.parametrize(("family", "base"), [("gpt2", "transformer."), ("opt", "model.")])
def test_names_without_the_base_model_are_served(tmp_path: Path, family: str, base: str) -> None:
    """As the published files of GPT-2 and OPT have them, with masks that have no effect."""
    make_model(tmp_path, family, blocks=2, shard_size="1GB")
    expected = tokens_of(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix(base): each for name, each in load_file(path).items()}
    if family == "gpt2":
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, path, {"format": "pt"})
    assert tokens_of(tmp_path) == expected


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_head_stored_beside_a_tied_embedding_must_equal_it(tmp_path: Path, family: str) -> None:
    """transformers ties equal tables only; a fine-tuned head would be lost without a word."""
    make_model(tmp_path, family, blocks=2, shard_size="1GB", tie_word_embeddings=True)
    expected, path, tables = tokens_of(tmp_path), tmp_path / "model.safetensors", TABLES[family]
    tensors = load_file(path)
    tensors[tables.head] = tensors[tables.embedding].clone()
    save_file(tensors, path, {"format": "pt"})
    assert tokens_of(tmp_path) == expected
    tensors[tables.head] = tensors[tables.head].flip(0).contiguous()
    save_file(tensors, path, {"format": "pt"})
    load_span(tmp_path, 0, 1)
    with pytest.raises(ModelSourceError) as fault:
        load_span(tmp_path, 1, 2)
    assert str(fault.value) == (
        f"model: {tmp_path}: tie_word_embeddings is true, by config.json or by default, but {tables.head} and "
        f"{tables.embedding} differ; allowed is false, or a checkpoint without {tables.head}"
    )
    change_config(tmp_path, tie_word_embeddings=False)
    assert tokens_of(tmp_path) != expected


@pytest.mark.parametrize(
    ("family", "changes"),
    [("mixtral", {"intermediate_size": 37}), ("deepseek_v3", {"moe_intermediate_size": 37})],
)
def test_experts_of_odd_sizes_run_one_by_one(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    """The kernel for all experts needs rows of a multiple of 16 bytes; small models for tests have 37 numbers."""
    make_model(tmp_path, family, blocks=2, **changes)
    whole: Any = load_whole(tmp_path)
    whole.set_experts_implementation("eager")
    expected = whole.generate(torch.tensor([[3, 14, 15, 92]]), do_sample=False, max_new_tokens=8)
    assert tokens_of(tmp_path)[: len(expected[0])] == expected[0].tolist()


@pytest.mark.parametrize("family", ["llama", "falcon"])
def test_form_of_the_output_in_the_config_is_not_obeyed(tmp_path: Path, family: str) -> None:
    make_model(tmp_path, family, blocks=2)
    expected = tokens_of(tmp_path)
    change_config(tmp_path, return_dict=False, output_hidden_states=True, output_attentions=True)
    assert tokens_of(tmp_path) == expected


def test_logit_fields_of_other_families_change_nothing(tmp_path: Path) -> None:
    """transformers keeps fields that a class does not know, and reads them nowhere."""
    make_model(tmp_path, "qwen3", blocks=2)
    change_config(tmp_path, logit_scale=2.0, logits_scaling=7.0, final_logit_softcapping=3.0)
    stream = Stream([3, 14, 15, 92])
    load_chain(tmp_path, (0, 1, 2)).generate([stream], 1)
    (pick,) = stream.picked
    logits = load_whole(tmp_path)(torch.tensor([stream.log[:-1]])).logits[0, -1]
    assert pick.logprob == pytest.approx(logits.log_softmax(-1)[pick.token].item(), abs=1e-4)


def test_block_for_several_tokens_is_left_out(tmp_path: Path) -> None:
    """DeepSeek-V3 stores one more block than it has layers."""
    make_model(tmp_path, "deepseek_v3", blocks=2, shard_size="1GB")
    expected = tokens_of(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.2.enorm.weight": torch.ones(64)}
    save_file(tensors, path, {"format": "pt"})
    assert tokens_of(tmp_path) == expected
    tensors["model.layers.3.enorm.weight"] = torch.ones(64)
    save_file(tensors, path, {"format": "pt"})
    assert "num_hidden_layers is 2; allowed is 4" in refusal(tmp_path)


def test_mxfp4_experts_equal_those_that_transformers_unpacks(tmp_path: Path) -> None:
    make_model(tmp_path, "gpt_oss", blocks=2, shard_size="1GB")
    path = tmp_path / "model.safetensors"
    plain = load_file(path)
    packed = dict(plain)
    generator = torch.Generator().manual_seed(1)
    for name in [each for each in plain if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = packed.pop(name).shape
        shape = (experts, rows, columns // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(121, 125, shape[:3], dtype=torch.uint8, generator=generator)
        packed |= {name + PACKED: blocks, name + SCALES: scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
        assert torch.equal(unpack_mxfp4(blocks, scales), plain[name])
    save_file(plain, path, {"format": "pt"})
    expected, facts = tokens_of(tmp_path), read_facts(tmp_path)
    save_file(packed, path, {"format": "pt"})
    change_config(tmp_path, quantization_config={"quant_method": "mxfp4"})
    assert tokens_of(tmp_path) == expected
    assert read_facts(tmp_path).weight_bytes(0, 2, "bfloat16") >= facts.weight_bytes(
        0, 2, "bfloat16"
    )


def test_published_code_that_transformers_has_is_accepted(tmp_path: Path) -> None:
    """As the published Phi-3 has it; the classes of transformers run, not those of the checkpoint."""
    make_model(tmp_path, "phi3", blocks=2)
    own = {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "org/name--modeling_phi3.Phi3ForCausalLM",
    }
    change_config(tmp_path, auto_map=own)
    assert read_facts(tmp_path).config.family == "phi3"
    change_config(tmp_path, auto_map={**own, "AutoModel": "modeling_phi3.OtherModel"})
    assert "auto_map.AutoModel is 'modeling_phi3.OtherModel'" in refusal(tmp_path)
