"""Refusals at a span's start: each guard works, each invalid input has its message."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.chain import OPTIONS, Stream, load_chain
from support.models.tiny_models import (
    EOS,
    VOCAB,
    load_whole,
    make_model,
    nest_as_gemma_3,
    write_tokenizer,
)

from modelswarm.checkpoint.facts import read_facts
from modelswarm.checkpoint.tensor_index import read_tensors
from modelswarm.checkpoint.tensor_names import ModelPart
from modelswarm.errors import ModelSourceError, UserError
from modelswarm.local.commands import LocalSettings, server_command
from modelswarm.local.planning import plan_document
from modelswarm.local.run_folder import RunFolder
from modelswarm.placement.memory import PROCESS_BYTES
from modelswarm.placement.slots import slots_of
from modelswarm.process.start_progress import StartPhase, StartProgress
from modelswarm.resources.spec import ModelSwarm
from modelswarm_serving.app import span_options
from modelswarm_serving.model.attention.attention import AttentionCall
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.transformer import loading, self_check
from modelswarm_serving.model.transformer.fusion import FusedBlocks
from modelswarm_serving.model.transformer.generic_blocks import GenericBlocks
from modelswarm_serving.model.transformer.startup import (
    SpanOptions,
    container_memory,
    load_span,
    plan_shape,
)
from modelswarm_serving.runtime.node import replay_limit
from modelswarm_serving.settings import parse_settings

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def trial(folder: Path) -> tuple[Any, KvCache]:
    loaded = loading.load_modules(folder, ModelPart(1, 3, 4), torch.float32, torch.device("cpu"))
    return loaded, KvCache(KvCacheShape(2, 4, 4, 2, 16), torch.float32, torch.device("cpu"))


def generic(loaded: loading.LoadedSpan) -> GenericBlocks:
    return GenericBlocks(loaded.body, "layers")


def test_progress_counts_every_byte_of_the_span(copy: Path) -> None:
    seen: list[StartProgress] = []

    load_span(copy, 1, 3, OPTIONS, lambda *step: seen.append(StartProgress(*step)))

    stored = read_tensors(copy, ModelPart(1, 3, 4).needs_tensor)
    total = sum(entry.size for entry in stored.values())
    reading = [step for step in seen if step.phase == StartPhase.READING]
    assert reading[0] == StartProgress(StartPhase.READING, 0, total)
    assert reading[-1] == StartProgress(StartPhase.READING, total, total)
    assert [step.done for step in reading] == sorted(step.done for step in reading)
    assert len(reading) == len(stored) + 1
    assert [step.phase for step in seen[len(reading) :]] == [StartPhase.CHECKING]


def test_only_the_needed_tensors_are_read(copy: Path) -> None:
    """A middle span starts from the shards of its blocks alone."""
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in index.items() if ".layers.1." in name or ".layers.2." in name}
    for file in set(index.values()) - needed:
        (copy / file).unlink()
    span = load_span(copy, 1, 3, OPTIONS)
    assert (span.shape.first, span.shape.last) == (1, 3)
    with pytest.raises(ModelSourceError, match=r"has no model-\d+-of-\d+.safetensors"):
        load_span(copy, 0, 2, OPTIONS)


def test_guard_one_missing_tensors_are_named(copy: Path) -> None:
    path = copy / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "model.layers.2.mlp.up_proj.weight"
    shard = copy / index["weight_map"].pop(name)
    save_file({k: v for k, v in load_file(shard).items() if k != name}, shard, {"format": "pt"})
    path.write_text(json.dumps(index))
    with pytest.raises(ModelSourceError, match=f"has no weights for {name}"):
        load_span(copy, 1, 3, OPTIONS)
    load_span(copy, 0, 2, OPTIONS)


def test_guard_one_tensors_of_another_shape_are_named(copy: Path) -> None:
    change_config(copy, intermediate_size=80)
    with pytest.raises(
        ModelSourceError,
        match=r"model.layers.0.mlp.* in .* has shape .* \[hidden_size 64, intermediate_size 80\]",
    ):
        load_span(copy, 0, 2, OPTIONS)


def test_guard_two_blocks_that_bypass_pages_are_noticed(folder: Path) -> None:
    loaded, pool = trial(folder)
    loaded.body.config._attn_implementation = "eager"
    with pytest.raises(ModelSourceError, match="its 2 blocks made 0 attention calls"):
        self_check.run_reference(loaded, generic(loaded), pool, folder)


def test_rows_of_the_self_check_differ_after_a_norm(folder: Path) -> None:
    """With rows that a norm makes equal, a fault of the attention would not change the output."""
    loaded, pool = trial(folder)
    rows = self_check.run_reference(loaded, generic(loaded), pool, folder).rows
    normed = torch.nn.functional.layer_norm(rows, rows.shape[1:])
    distances = torch.cdist(normed, normed) + torch.eye(len(rows)) * 100
    assert float(distances.min()) > 1


def test_guard_three_forward_beyond_its_blocks_is_noticed(folder: Path) -> None:
    """A final norm left in place changes rows outside the blocks, like Granite's embedding multiplier."""
    loaded, pool = trial(folder)
    loaded.body.norm = torch.nn.LayerNorm(64)
    with pytest.raises(ModelSourceError, match="cannot be split: rows change outside"):
        self_check.run_reference(loaded, generic(loaded), pool, folder)


@pytest.mark.parametrize("layer_type", ["linear_attention", "chunked_attention"])
def test_guard_four_unknown_layer_types_are_refused(tmp_path: Path, layer_type: str) -> None:
    make_model(tmp_path, "qwen3", blocks=2)
    change_config(tmp_path, layer_types=["full_attention", layer_type])
    with pytest.raises(ModelSourceError, match=layer_type):
        load_span(tmp_path, 0, 1, OPTIONS)


def test_guard_five_compact_blocks_that_differ_are_noticed(folder: Path) -> None:
    loaded, pool = trial(folder)
    result = self_check.run_reference(loaded, generic(loaded), pool, folder)
    loaded.body.layers[1].mlp.down_proj.weight.data[0] += 1.0
    with pytest.raises(ModelSourceError, match="its blocks differ from the model's by"):
        self_check.check_blocks(FusedBlocks(loaded.body, torch.float32), result, pool, folder)


def test_guard_five_another_window_is_noticed(folder: Path) -> None:
    """A window of 4096 has no effect on a few rows, so the attention calls of each block are compared too."""
    loaded, pool = trial(folder)
    result = self_check.run_reference(loaded, generic(loaded), pool, folder)
    asked = [replace(call, window=4096) for call in result.calls]
    assert asked[0] == AttentionCall(0, 0.25, 4096, None)
    with pytest.raises(ModelSourceError, match="attention that is not supported"):
        self_check.check_blocks(
            FusedBlocks(loaded.body, torch.float32), replace(result, calls=asked), pool, folder
        )


def test_rope_that_depends_on_the_batch_is_refused(copy: Path) -> None:
    change_config(
        copy, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    )
    with pytest.raises(ModelSourceError, match="rope_type is 'dynamic'; allowed are default"):
        load_span(copy, 0, 2, OPTIONS)


def test_llama_3_rope_is_the_models_own(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    }
    make_model(tmp_path, "llama", rope_parameters=rope)
    prompt = [1 + at * 7 % (VOCAB - 1) for at in range(300)]  # beyond the first table of angles
    stream = Stream(list(prompt))
    load_chain(tmp_path, (0, 2, 4)).generate([stream], 8, eos=EOS)

    whole: Any = load_whole(tmp_path)
    ids = torch.tensor([prompt])
    [expected] = whole.generate(ids, do_sample=False, max_new_tokens=8, pad_token_id=EOS)
    assert stream.log == expected.tolist()


def test_gemma_3_with_vision_tower_serves_its_text_model(tmp_path: Path) -> None:
    make_model(tmp_path / "text", "gemma3")
    expected, found = Stream([3, 4, 5]), Stream([3, 4, 5])
    load_chain(tmp_path / "text", (0, 2, 4)).generate([expected], 8)
    nest_as_gemma_3(tmp_path / "text", tmp_path / "whole")
    load_chain(tmp_path / "whole", (0, 2, 4)).generate([found], 8)
    assert found.log == expected.log


def test_memory_budget_leaves_the_rest_to_pages(folder: Path) -> None:
    """Pages and their retained rows get the rest of the memory after process, weights, activations and margin."""
    facts = read_facts(folder)
    options = SpanOptions(threads=1, page_size=4, max_length=64)
    memory = container_memory(facts, 0, 2, options)
    given = replace(options, memory=memory.needed(10))
    assert load_span(folder, 0, 2, given).shape.total_pages == 10
    assert (
        plan_shape(folder, 0, 2, replace(given, memory=memory.needed(11) - 1))[0].total_pages == 10
    )
    larger = replace(given, process=PROCESS_BYTES + memory.kv_per_page + memory.retained_per_page)
    assert plan_shape(folder, 0, 2, larger)[0].total_pages == 9
    without_rows = replace(given, replay_memory=0)
    assert plan_shape(folder, 0, 2, without_rows)[0].total_pages > 10
    with pytest.raises(UserError, match=r"memory: .* leave no room for KV: .* at least \d+Mi"):
        load_span(folder, 0, 2, replace(options, memory=memory.needed(1) - 1))


@pytest.mark.parametrize("flags", [(), ("--replay-memory", "64Ki")])
@pytest.mark.parametrize("memory", ["900Mi", "1Gi", "3Gi"])
def test_all_parts_of_a_server_fit_into_its_memory(
    folder: Path, memory: str, flags: tuple[str, ...]
) -> None:
    settings = parse_settings(["--name", "s", "--model", f"file://{folder}", "--blocks", "0:2",
                      "--memory", memory, *flags])  # fmt: skip
    options = span_options(settings, None)
    shape, facts = plan_shape(folder, 0, 2, options)
    planned = container_memory(facts, 0, 2, options).with_pages(shape.total_pages)
    assert planned.kv == shape.total_pages * shape.page_size * 2 * facts.kv_bytes("float32")
    assert planned.retained == replay_limit(settings, shape)
    assert settings.memory is not None
    page = shape.page_size * (2 * facts.kv_bytes("float32") + facts.row_bytes("float32") + 1024)
    assert settings.memory - page < planned.total <= settings.memory


@pytest.mark.parametrize("training", [{}, {"memory": "64Mi"}, {"memory": 0}])
def test_server_uses_the_memory_of_its_plan(
    folder: Path, tmp_path: Path, training: dict[str, Any]
) -> None:
    document = ModelSwarm.parse(
        {
            "apiVersion": "modelswarm.io/v1alpha1",
            "kind": "ModelSwarm",
            "metadata": {"name": "tiny"},
            "spec": {
                "model": {"source": f"file://{folder}"},
                "spans": {"count": 2},
                "training": training,
            },
        }
    )
    plan = plan_document(document, "1Gi")
    for slot in slots_of(plan.name, plan.spans, 1):
        command = server_command(plan, slot, LocalSettings(), RunFolder(tmp_path, 0), 1, 0)
        settings = parse_settings(command[command.index("modelswarm_serving") + 1 :])
        shape, facts = plan_shape(
            folder, settings.first, settings.last, span_options(settings, None)
        )
        server = plan.servers[slot.span_index]
        kv = shape.total_pages * shape.page_size * slot.span.blocks * facts.kv_bytes(plan.dtype)
        needs = server.memory
        assert (kv, replay_limit(settings, shape)) == (needs.kv, needs.retained)
        model = container_memory(facts, settings.first, settings.last, span_options(settings, None))
        assert model.with_pages(shape.total_pages) == needs
        assert settings.training_memory == plan.training_memory
        assert needs.total <= 1 << 30


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "int4"}, "dtype: 'int4' is not one of float32, bfloat16, float16"),
        ({"memory": 1000}, "pages: give either pages or memory, not both"),
        ({"page_size": 0}, "page_size: must be at least 1, not 0"),
        ({"threads": -1}, "threads: must be at least 1, not -1"),
        ({"max_length": 513}, "max_length: 513 is more than the model's context of 512 positions"),
    ],
)
def test_options_that_cannot_be_met_are_named(
    folder: Path, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        load_span(folder, 0, 2, replace(OPTIONS, **changes))


@pytest.mark.parametrize("blocks", [(0, 5), (3, 3), (-1, 2)])
def test_blocks_out_of_range_are_refused(folder: Path, blocks: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=r"blocks: .* is out of range: the model has blocks 0:4"):
        load_span(folder, *blocks, OPTIONS)


def test_tokenizer_of_wrong_size_stops_the_start(copy: Path) -> None:
    write_tokenizer(copy, VOCAB)
    config = json.loads((copy / "tokenizer.json").read_text())
    first = config["added_tokens"][0]
    extra = [first | {"id": i, "content": f"<|{i}|>"} for i in range(257, VOCAB + 1)]
    config["added_tokens"].extend(extra)
    (copy / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(ModelSourceError, match="allowed is a vocab_size of at least"):
        load_span(copy, 0, 2, OPTIONS)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ModelSourceError, match=r"has no tokenizer.json"):
        load_span(copy, 0, 2, OPTIONS)
