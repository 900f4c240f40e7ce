"""Triton kernels attend as dense attention does, and padded decode steps give the tokens of plain steps.

Computed by Triton's interpreter on the CPU, and compiled for GPUs that need not be there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models.interpreted import run_interpreted
from support.models.tiny_models import GENERIC, TINY

from modelswarm.placement.memory import TOKEN_BUDGET
from modelswarm_serving.model.transformer.device_pages import warm_up_rows

pytest.importorskip("triton", reason="torch has no Triton on this platform")

FAST_SEEDS = range(24)
FULL_SEEDS, SOAK_SEEDS = range(24, 250), range(250, 600)
SHARED_BYTES: dict[int | str, int] = {
    **{80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10},
    **{"gfx90a": 64 << 10, "gfx942": 64 << 10},
}
"""Shared memory of a block of threads, by compute capability (CUDA's programming guide) or AMD's architecture."""

HEADS = (
    (torch.bfloat16, 64, 8),
    (torch.bfloat16, 64, 71),  # Falcon-7B
    (torch.bfloat16, 128, 16),  # GLM-4
    (torch.bfloat16, 128, 4),
    (torch.bfloat16, 256, 2),
    (torch.float16, 96, 1),
    (torch.float32, 128, 4),
)
"""Head sizes, and query heads of each key head."""


@pytest.fixture(scope="module")
def fast_cases() -> list[dict[str, Any]]:
    """Cases of the fast tier, in one process: most of its time is the import of torch and transformers."""
    return run_interpreted(["far", *map(str, FAST_SEEDS), "memory", "fault", "gemma3"])


def test_attention_over_pages_equals_dense(fast_cases: list[dict[str, Any]]) -> None:
    calls = fast_cases[1:-3]
    assert [case["seed"] for case in calls] == list(FAST_SEEDS)
    assert not [case for case in calls if not case["difference"] <= case["limit"]]
    seen = {feature for case in calls for feature in case["features"]}
    assert seen == {"window", "softcap", "slopes", "sinks"}
    assert {case["dtype"] for case in calls} == {"torch.float32", "torch.bfloat16", "torch.float16"}


def test_slots_beyond_31_bits_are_read(fast_cases: list[dict[str, Any]]) -> None:
    assert fast_cases[0]["difference"] <= fast_cases[0]["limit"]


def test_padded_decode_gives_the_plain_tokens(fast_cases: list[dict[str, Any]]) -> None:
    case = fast_cases[-1]
    assert case["were_padded"]
    assert case["compute"] == ["triton", True]
    assert case["padded"] == case["plain"]


def test_fault_in_decode_steps_stops_the_start(fast_cases: list[dict[str, Any]]) -> None:
    assert "its blocks differ from the model's by" in fast_cases[-2]["error"]


def test_captured_steps_are_not_in_the_memory_of_pages(fast_cases: list[dict[str, Any]]) -> None:
    assert fast_cases[-3]["free"] >= fast_cases[-3]["step"] > 0


@pytest.mark.full
@pytest.mark.parametrize("seeds", [FULL_SEEDS, pytest.param(SOAK_SEEDS, marks=pytest.mark.soak)])
def test_many_random_calls_equal_dense_attention(seeds: range) -> None:
    calls = run_interpreted(map(str, seeds))
    assert len(calls) == len(seeds)
    assert not [case for case in calls if not case["difference"] <= case["limit"]]


@pytest.mark.full
def test_padded_decode_of_every_family_is_plain() -> None:
    cases = run_interpreted(TINY)
    assert [case["family"] for case in cases] == list(TINY)
    # Blocks by transformers' own forward are not captured; their steps attend by the kernels all the same.
    assert all(case["were_padded"] == (case["family"] not in GENERIC) for case in cases)
    assert [case["padded"] for case in cases] == [case["plain"] for case in cases]


@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("processors", [40, 114, 132])
@pytest.mark.parametrize(("context", "window"), [(512, None), (8192, None), (8192, 1024)])
def test_start_compiles_every_number_of_parts(
    processors: int, kv_heads: int, context: int, window: int | None
) -> None:
    """Else a step of some session waits for the compiler."""
    from modelswarm_serving.model.attention.backend import Scoring
    from modelswarm_serving.model.attention.triton_attention import DeviceLimits, Launch

    keys, query = torch.zeros(16, kv_heads, 64), torch.zeros(1, kv_heads, 64)
    limits = DeviceLimits.of_gpu(processors, SHARED_BYTES[90])
    launch = Launch(limits, 16, keys, keys, query, Scoring(1.0, window=window))
    needed = {
        launch._part_count(rows, position)
        for rows in range(1, 513)
        for position in range(0, context, 64)
    }
    rows_at_start = warm_up_rows(TOKEN_BUDGET)
    assert needed == {launch._part_count(rows, context - 1) for rows in rows_at_start}


@pytest.mark.full
@pytest.mark.parametrize("architecture", SHARED_BYTES)
def test_kernels_compile_within_shared_memory(
    architecture: int | str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assemblers come with Triton, so that machine code is made without a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for dtype, size, group in HEADS:
        for is_decode in (True, False):
            used = compiled_shared_bytes(architecture, dtype, size, group, is_decode)
            assert used <= SHARED_BYTES[architecture], (dtype, size, group, is_decode)


def test_kernel_compiles_for_a_device_without_tf32(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton checks the precision of products that ignore it, too."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compiled_shared_bytes("gfx90a", torch.bfloat16, 64, 1, is_decode=True)


def compiled_shared_bytes(
    architecture: int | str, dtype: torch.dtype, size: int, group: int, is_decode: bool
) -> int:
    """Compile a launch with all features for a GPU and return the shared memory that it needs."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from modelswarm_serving.model.attention.backend import Scoring
    from modelswarm_serving.model.attention.triton_attention import DeviceLimits, Launch
    from modelswarm_serving.model.attention.triton_kernels import attend_tiles

    is_amd = isinstance(architecture, str)
    keys, heads = torch.zeros(16, 1, size, dtype=dtype), torch.zeros(group)
    scoring = Scoring(1.0, window=64, softcap=5.0, slopes=heads, sinks=heads)
    limits = DeviceLimits.of_gpu(100, 0 if is_amd else SHARED_BYTES[architecture])
    query = torch.zeros(1, group, size, dtype=dtype)
    launch = Launch(limits, 16, keys, keys, query, scoring)
    constants = launch.constants(is_decode, 8 if is_decode else 1)
    code = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    kinds = {
        **dict.fromkeys(("query", "keys", "values", "out"), code),
        **dict.fromkeys(("part_out", "part_weight", "slopes", "sinks"), "*fp32"),
        **{"tiles": "*i32", "table": "*i32", "positions": "*i64"},
        **{"scaling": "fp32", "softcap": "fp32"},
        **dict.fromkeys(constants, "constexpr"),
    }
    names: list[str] = attend_tiles.arg_names
    source = ASTSource(
        fn=attend_tiles,
        signature={name: kinds.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (place,): [["tt.divisibility", 16]]  # as pointers and strides have in a launch
            for place, name in enumerate(names)
            if kinds.get(name, "i32").startswith("*") or name.endswith(("_row", "_slot", "_head"))
        },
    )
    target = GPUTarget("hip" if is_amd else "cuda", architecture, 64 if is_amd else 32)
    shared: int = triton.compile(
        source, target=target, options=launch.options(is_decode)
    ).metadata.shared
    return shared
