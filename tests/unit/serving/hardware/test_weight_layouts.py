"""Layouts of weights: their products are those of torch, and a measurement chooses one."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.models.adapters import make_adapter
from support.models.chain import Stream, load_chain
from support.models.device_library import DeviceLibrary
from support.models.tiny_models import GENERIC, make_model

from modelswarm.checkpoint.tensor_names import ModelPart
from modelswarm.errors import UserError
from modelswarm_serving.model.linear.layout_choice import (
    LayoutChoice,
    batch_sizes,
    best_layout,
    choose_layout,
)
from modelswarm_serving.model.linear.layouts import WeightLayout
from modelswarm_serving.model.linear.replacement import MeasuredLinear
from modelswarm_serving.model.linear.weight import Weight, has_onednn, usable_layouts
from modelswarm_serving.model.transformer.fusion import FusedBlocks
from modelswarm_serving.model.transformer.loading import load_modules
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span, plan_shape

PLAIN, PACKED, TRANSPOSED = WeightLayout.PLAIN, WeightLayout.PACKED, WeightLayout.TRANSPOSED
CASES = [
    (dtype, layout)
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
    for layout in usable_layouts(dtype)
]
# with a head of its own, a shared one, transformers' own modules, Conv1D, latent pages, our own modules
LAID_OUT = [
    *("llama", "gemma3", "gpt2"),
    *(pytest.param(each, marks=pytest.mark.full) for each in GENERIC if each != "gpt2"),
]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.002}


def make_matrix(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(outputs)
    matrix: torch.Tensor = torch.randn(outputs, inputs, generator=generator).to(dtype)
    return matrix.div(inputs**0.5)


def laid_out(matrix: torch.Tensor, layout: WeightLayout) -> Weight:
    weight = Weight(matrix)
    weight.lay_out(layout)
    return weight


@pytest.mark.parametrize(("dtype", "layout"), CASES)
@pytest.mark.parametrize("count", [1, 2, 7])
@torch.inference_mode()
def test_products_are_those_of_torch(dtype: torch.dtype, layout: WeightLayout, count: int) -> None:
    matrix, rows = make_matrix(77, 100, dtype), make_matrix(count, 100, dtype)
    bias, base = make_matrix(1, 77, dtype)[0], make_matrix(count, 77, dtype)
    before = base.clone()
    weight = laid_out(matrix, layout)
    expected = F.linear(rows.double(), matrix.double())
    for found, wanted in (
        (weight.multiply(rows), expected),
        (weight.multiply(rows.t().contiguous().t()), expected),
        (weight.multiply(rows, bias), expected + bias),
        (weight.multiply_onto(base, rows), expected + base),
    ):
        assert found.dtype is dtype
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=0.02)
    assert torch.equal(base, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrix_is_the_same_in_every_layout(dtype: torch.dtype) -> None:
    matrix = make_matrix(33, 130, dtype)
    for first, second in itertools.permutations(usable_layouts(dtype), 2):
        weight = laid_out(matrix, first)
        weight.lay_out(second)
        assert (weight.layout, weight.inputs) == (second, 130)
        assert torch.equal(weight.matrix(), matrix)


def test_shared_matrix_is_never_copied() -> None:
    matrix = make_matrix(33, 130)
    weight = Weight(matrix, is_shared=True)
    for layout, found in ((PACKED, PLAIN), (TRANSPOSED, TRANSPOSED), (PLAIN, PLAIN)):
        weight.lay_out(layout)
        assert weight.layout is found
        assert weight.matrix().data_ptr() == matrix.data_ptr()
        torch.testing.assert_close(weight.multiply(matrix[:3]), matrix[:3] @ matrix.t())


@pytest.mark.parametrize("layout", usable_layouts(torch.float32))
def test_gradient_reaches_rows(layout: WeightLayout) -> None:
    """Weights are laid out at start as a server does it."""
    matrix, bias = make_matrix(77, 100), make_matrix(1, 77)[0]
    weight = Weight(matrix)
    with torch.no_grad():
        weight.lay_out(choose_layout([weight], torch.float32, 1, layout).layout)
    assert weight.layout is layout
    rows = make_matrix(5, 100).requires_grad_()
    base = make_matrix(5, 77).requires_grad_()
    output = weight.multiply_onto(base, rows) + weight.multiply(rows, bias)
    torch.autograd.backward(output, make_matrix(5, 77))
    assert rows.grad is not None and base.grad is not None
    torch.testing.assert_close(rows.grad, 2 * make_matrix(5, 77) @ matrix)
    assert torch.equal(base.grad, make_matrix(5, 77))


def test_best_layout_takes_the_fewest_seconds_over_all_rows() -> None:
    slow_alone = {TRANSPOSED: {1: 1.0, 8: 3.0}, PACKED: {1: 1.3, 8: 1.6}}
    assert best_layout(slow_alone) is PACKED
    avx2 = {TRANSPOSED: {1: 2.2, 3: 3.4, 10: 5.3}, PACKED: {1: 2.9, 3: 2.5, 10: 3.8}}
    assert best_layout(avx2) is PACKED, "geometric means of an EPYC with AVX2, which are 11 % apart"
    assert best_layout({name: {1: found[1]} for name, found in slow_alone.items()}) is TRANSPOSED


@pytest.mark.parametrize(
    ("plain", "packed", "best"),
    [
        (1.0, 1.0, TRANSPOSED),
        (0.92, 0.92, TRANSPOSED),
        (0.88, 1.0, PLAIN),
        (0.88, 0.88, PACKED),
        (0.75, 0.8, PACKED),
        (0.7, 0.8, PLAIN),
    ],
)
def test_noise_does_not_choose(plain: float, packed: float, best: WeightLayout) -> None:
    """Replicas on equal machines should choose the same layout."""
    assert best_layout({PLAIN: {1: plain}, TRANSPOSED: {1: 1.0}, PACKED: {1: packed}}) is best
    assert best_layout({PACKED: {1: packed}, TRANSPOSED: {1: 1.0}, PLAIN: {1: plain}}) is best


@pytest.mark.parametrize(
    ("sessions", "rows"), [(0, (1,)), (1, (1,)), (2, (1, 2)), (10, (1, 3, 10)), (500, (1, 5, 32))]
)
def test_measured_batches_are_those_of_the_sessions(sessions: int, rows: tuple[int, ...]) -> None:
    assert batch_sizes(sessions) == rows


def test_small_weights_are_not_measured() -> None:
    weight = laid_out(make_matrix(64, 64), TRANSPOSED)
    assert choose_layout([weight], torch.float32, 8) == LayoutChoice(TRANSPOSED, {})


def test_large_weights_are_measured_in_every_layout() -> None:
    weights = [laid_out(make_matrix(2048, 1536 + n), TRANSPOSED) for n in (0, 0, 512)]
    choice = choose_layout(weights, torch.float32, 4)
    assert choice.layout is best_layout(choice.seconds)
    assert {layout: tuple(found) for layout, found in choice.seconds.items()} == dict.fromkeys(
        usable_layouts(torch.float32), (1, 2, 4)
    )
    for weight, inputs in zip(weights, (1536, 1536, 2048), strict=True):
        assert torch.equal(weight.matrix(), make_matrix(2048, inputs))
    assert str(choice).startswith(f"weights {choice.layout} by measured products: transposed 1 row")


@pytest.mark.parametrize("layout", usable_layouts(torch.float32))
@pytest.mark.parametrize("family", LAID_OUT)
def test_spans_compute_the_same_in_every_layout(
    tmp_path: Path, family: str, layout: WeightLayout
) -> None:
    folder = make_model(tmp_path, family)
    options = SpanOptions(threads=1, pages=64, page_size=4)
    expected, found = ([Stream([5, 9, 2, 7]), Stream([3] * 11)] for _ in range(2))
    load_chain(folder, (0, 4), options=options).generate(expected, 8)
    chosen = SpanOptions(threads=1, pages=64, page_size=4, weight_layout=layout)
    chain = load_chain(folder, (0, 2, 4), options=chosen)
    chain.generate(found, 8)
    assert [stream.log for stream in found] == [stream.log for stream in expected]
    assert [span.compute.layout for span in chain.spans] == [layout, layout]
    other = [] if layout is TRANSPOSED else [layout]
    assert all(span.compute.numerics.split("/")[3:] == other for span in chain.spans)


def test_fused_weights_wait_for_the_choice_as_they_are_stored(tmp_path: Path) -> None:
    """A layout that is not wanted is never made."""
    folder, part = make_model(tmp_path), ModelPart(0, 2, 4)
    loaded = load_modules(folder, part, torch.float32, torch.device("cpu"))
    assert {each.layout for each in FusedBlocks(loaded.body, torch.float32).weights} == {PLAIN}
    for wanted, layout in (("auto", TRANSPOSED), (PLAIN, PLAIN)):
        options = SpanOptions(threads=1, pages=8, weight_layout=wanted)
        blocks = load_span(folder, 0, 2, options)._blocks
        assert isinstance(blocks, FusedBlocks)
        assert {weight.layout for weight in blocks.weights} == {layout}


def test_small_blocks_of_transformers_keep_their_modules(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "gpt2")
    compute = load_span(folder, 0, 2, SpanOptions(threads=1, pages=8)).compute
    assert compute.layout == "" and compute.numerics.split("/")[3:] == ["modules"]


@pytest.mark.parametrize("layout", usable_layouts(torch.float32))
def test_adapters_add_to_weights_of_every_layout(tmp_path: Path, layout: WeightLayout) -> None:
    folder = make_model(tmp_path / "model", "gpt_neox")
    adapter = make_adapter(folder, tmp_path / "adapter")
    found = []
    for chosen in ("auto", layout):
        options = SpanOptions(
            threads=1, pages=64, page_size=4, adapters={"a": adapter}, weight_layout=chosen
        )
        stream = Stream([5, 9, 2, 7], adapter="a")
        load_chain(folder, (0, 4), options=options).generate([stream], 8)
        found.append(stream.log)
    assert found[0] == found[1]


def test_replaced_projection_gives_its_matrix() -> None:
    """BLOOM's `slow_but_exact` reads it."""
    for layout in usable_layouts(torch.float32):
        matrix = make_matrix(77, 100)
        assert torch.equal(MeasuredLinear(laid_out(matrix, layout), None).weight, matrix)


def test_matrix_of_another_order_becomes_plain() -> None:
    """Conv1D has [in, out]; products of its transposed view are other ones, and slower."""
    matrix = make_matrix(77, 100)
    weight = Weight(matrix.t().contiguous().t())
    assert weight.layout is PLAIN and torch.equal(weight.matrix(), matrix)
    assert weight.matrix().is_contiguous()


COUNT_PRODUCTS = """
from modelswarm_serving.model.linear.product_caches import limit_product_caches
limit_product_caches()
import resource, torch
from modelswarm_serving.model.linear.weight import _linear
torch.set_num_threads(1)
weights = [torch.ones(64, 64 + 16 * n) for n in range(5)]
def most(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
with torch.inference_mode():
    for weight in weights:
        _linear(torch.ones(1, weight.shape[1]), weight, None)
    before = most()
    for rows in range(2, 102):
        for weight in weights:
            _linear(torch.ones(rows, weight.shape[1]), weight, None)
print(most() - before)
"""


@pytest.mark.skipif(not has_onednn(torch.float32), reason="torch has no oneDNN here")
def test_products_of_many_shapes_keep_little_memory() -> None:
    """500 products would keep 250 MiB by default, which no plan counts."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT_PRODUCTS], check=True, capture_output=True, text=True
    )
    assert int(done.stdout) < 80  # MiB


def test_layout_without_a_product_is_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path)
    if PACKED in usable_layouts(torch.float16):
        pytest.skip("this CPU has all products")
    with pytest.raises(UserError, match="this CPU has no product of packed float16; allowed: auto"):
        plan_shape(folder, 0, 2, SpanOptions(weight_layout="packed", dtype="float16", pages=8))


def test_layout_on_an_accelerator_is_refused(tmp_path: Path) -> None:
    options = SpanOptions(weight_layout="packed", pages=8, device=DeviceLibrary().open())
    with pytest.raises(UserError, match="is of a CPU, but the server computes on cuda:0"):
        plan_shape(make_model(tmp_path), 0, 2, options)
