"""The number format of a swarm: chosen once by the plan, from the document, the checkpoint and the hardware."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from modelswarm.checkpoint.facts import ModelConfig, ModelFacts
from modelswarm.local.planning import machine_hardware
from modelswarm.placement.dtype import (
    ACCELERATORS,
    FAST_CPU,
    SLOW_CPU,
    UNKNOWN_CPUS,
    Hardware,
    choose_dtype,
    gpus_of_capability,
)
from modelswarm.placement.plan import SwarmPlan, plan_swarm
from modelswarm.resources.spec import ModelSwarm

FACTS = ModelFacts(
    config=ModelConfig("llama", n_blocks=8, hidden=64, vocab=320, context=512, tied=False),
    dtype="bfloat16",
    block_elements=10_000,
    embedding_elements=64 * 320,
    kv_elements=64,
)
CPU = {"name": "cpu"}
GPU = {"name": "gpu", "resources": {"limits": {"nvidia.com/gpu": 1}}}
CLAIM = {"name": "claim", "podTemplate": {"spec": {"resourceClaims": [{"name": "gpu"}]}}}
NETWORK = {"name": "net", "resources": {"limits": {"rdma/hca": 1}}}


def plan(
    *pools: dict[str, Any],
    stored: str = "bfloat16",
    dtype: str = "auto",
    hardware: Hardware | None = None,
) -> SwarmPlan:
    document = {
        "apiVersion": "modelswarm.io/v1alpha1",
        "kind": "ModelSwarm",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"source": "file:///tiny", "dtype": dtype},
            "spans": {"count": 1},
            "sessions": {"concurrent": 1},
            "pools": list(pools),
        },
    }
    facts = replace(FACTS, dtype=stored)
    return plan_swarm(ModelSwarm.parse(document), facts, "file:///tiny", hardware=hardware)


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("hardware", [ACCELERATORS, UNKNOWN_CPUS, FAST_CPU, SLOW_CPU])
def test_asked_dtype_is_used_on_every_hardware(hardware: Hardware, stored: str) -> None:
    assert choose_dtype("float16", stored, hardware).name == "float16"


@pytest.mark.parametrize(
    ("hardware", "stored", "chosen"),
    [
        (ACCELERATORS, "float32", "float32"),
        (ACCELERATORS, "bfloat16", "bfloat16"),
        (ACCELERATORS, "float16", "float16"),
        (gpus_of_capability(None), "bfloat16", "bfloat16"),
        (gpus_of_capability(8), "bfloat16", "bfloat16"),
        (gpus_of_capability(7), "bfloat16", "float32"),
        (gpus_of_capability(7), "float16", "float16"),
        (FAST_CPU, "bfloat16", "bfloat16"),
        (FAST_CPU, "float16", "float32"),
        (SLOW_CPU, "bfloat16", "float32"),
        (UNKNOWN_CPUS, "bfloat16", "float32"),
        (UNKNOWN_CPUS, "float32", "float32"),
    ],
)
def test_auto_is_the_checkpoints_dtype_where_it_is_fast(
    hardware: Hardware, stored: str, chosen: str
) -> None:
    assert choose_dtype("auto", stored, hardware).name == chosen


@pytest.mark.parametrize(
    ("pools", "chosen"),
    [
        ((), "float32"),
        ((CPU,), "float32"),
        ((GPU,), "bfloat16"),
        ((GPU, CLAIM), "bfloat16"),
        ((GPU, CPU), "float32"),
        ((NETWORK,), "float32"),
    ],
)
def test_auto_is_the_checkpoints_dtype_on_accelerators(
    pools: tuple[dict[str, Any], ...], chosen: str
) -> None:
    planned = plan(*pools)
    assert planned.dtype == chosen
    assert planned.servers[0].memory.weights == FACTS.weight_bytes(0, 8, chosen)


def test_plan_names_the_reason_for_its_dtype() -> None:
    assert plan(GPU).dtype_reason == "as the checkpoint is stored"
    assert plan(GPU, dtype="float16").dtype_reason == "as the document says"
    assert plan(CPU).dtype_reason == (
        "a CPU that the plan does not know may be slow at the checkpoint's bfloat16"
    )


@pytest.mark.parametrize(
    ("lines", "hardware"),
    [
        (["flags\t\t: fpu avx512f avx512_bf16 sse"] * 2, FAST_CPU),
        (["flags\t\t: fpu amx_bf16"], FAST_CPU),
        (["Features\t: fp asimd bf16 i8mm"], FAST_CPU),
        (["flags\t\t: fpu avx512_bf16", "flags\t\t: fpu avx2"], SLOW_CPU),
        (["flags\t\t: fpu avx2 f16c", "vmx flags\t: avx512_bf16"], SLOW_CPU),
        (["bogomips\t: avx512_bf16"], SLOW_CPU),
    ],
)
def test_bfloat16_needs_the_feature_on_every_cpu(
    tmp_path: Path, lines: list[str], hardware: Hardware
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text("\n".join(["processor\t: 0", *lines, ""]))
    assert machine_hardware("cpu", tmp_path) is hardware
    assert machine_hardware("auto", tmp_path) is hardware


def test_plan_names_the_kernels_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    lines = ("vendor_id\t: AuthenticAMD", "flags\t\t: fpu avx2 avx512bw avx512_bf16", "")
    (tmp_path / "proc/cpuinfo").write_text("\n".join(lines))
    found = machine_hardware("cpu", tmp_path)
    assert found == replace(FAST_CPU, name="this CPU (amd-avx512_bf16)")
    planned = plan(hardware=found)
    assert (planned.dtype, planned.hardware) == ("bfloat16", "this CPU (amd-avx512_bf16)")
    assert plan(GPU).hardware == "an accelerator"
    assert plan(CPU, GPU).hardware == "a CPU that the plan does not know"


def test_machine_without_cpuinfo_is_a_slow_cpu(tmp_path: Path) -> None:
    assert machine_hardware("cpu", tmp_path) is SLOW_CPU


@pytest.mark.parametrize("device", ["cuda", "cuda:1", "accelerator"])
def test_asked_accelerator_decides_instead_of_the_cpu(tmp_path: Path, device: str) -> None:
    assert machine_hardware(device, tmp_path) is ACCELERATORS
