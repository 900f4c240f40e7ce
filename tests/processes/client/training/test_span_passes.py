"""Passes of a span in this process: outputs and gradients are those of transformers, whatever the parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.chain import OPTIONS
from support.models.tiny_models import TINY, load_whole, make_model
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm_serving.model.passes.contract import PassTask
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import load_span

FAST = ("llama", "gemma3")  # the plainest, and one with every special feature
LENGTHS = (21, 1, 40)
TOLERANCE = 1e-4  # relative to the largest value


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=() if f in FAST else pytest.mark.full) for f in TINY],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp(request.param), str(request.param))


def raw(*parts: Tensor) -> bytes:
    return b"".join(part.contiguous().numpy().tobytes() for part in parts)


def run_pass(span: TransformerSpan, task: PassTask, data: bytes, part_rows: int) -> list[Tensor]:
    """Return the result, [rows, hidden], and for a backward pass the gradients of the prompts behind it."""
    assert len(data) == task.input_bytes(span.shape)
    running = span.start_pass(task, data, part_rows)
    parts = 1
    while not running.advance():
        parts += 1
    found = running.result()
    rows = task.rows + task.is_backward * task.prompts
    assert len(found) == rows * span.shape.row_bytes
    hidden = span.shape.row_bytes // 4
    flat = torch.frombuffer(bytearray(found), dtype=torch.float32).view(-1, hidden)
    return [flat[: task.rows], flat[task.rows :]]


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations in the thread that enters it."""

    count = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_pass_makes_no_tensor_before_its_first_part(folder: Path) -> None:
    """The event loop starts it, and a copy to a device would wait there for the engine's step."""
    span = load_span(folder, 0, 2, OPTIONS)
    task = PassTask((0, 2), LENGTHS, prompt_rows=1)
    data = bytes(task.input_bytes(span.shape))
    with Operations() as operations:  # type: ignore[no-untyped-call]
        running = span.start_pass(task, data, 16)
        assert operations.count == 0
        running.advance()
        assert operations.count > 0


def whole_blocks(model: Any, first: int, last: int, rows: Tensor, prompts: Tensor) -> Tensor:
    """Run blocks of transformers on rows [1, length, hidden], by hooks that add the prompts before each."""
    layers = model.get_submodule(FAMILIES[model.config.model_type].tables.blocks)
    found: dict[int, Tensor] = {}

    def enter(index: int) -> Any:
        def hook(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = kwargs.pop("hidden_states", None)
            hidden = args[0] if given is None else given
            if index == first:
                hidden = rows
            if index == last:
                found[last] = hidden
            if first <= index < last and prompts.shape[1]:
                count = prompts.shape[1]
                head = hidden[:, :count] + prompts[index - first]
                hidden = torch.cat((head, hidden[:, count:]), dim=1)
            return (hidden, *args[1:]), kwargs

        return hook

    handles = [
        layer.register_forward_pre_hook(enter(index), with_kwargs=True)
        for index, layer in enumerate(layers)
    ]
    try:
        model(torch.zeros(1, rows.shape[1], dtype=torch.int64), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found[last]


@pytest.mark.parametrize("part_rows", [7, 64])
def test_gradients_equal_those_of_transformers(folder: Path, part_rows: int) -> None:
    check_gradients(folder, part_rows)


def test_gradients_pass_activations_that_save_their_result(tmp_path: Path) -> None:
    check_gradients(make_model(tmp_path, hidden_act="relu"), 64)


def check_gradients(folder: Path, part_rows: int) -> None:
    """Compare blocks 1:3 of a span 1:4, of sequences of other lengths, with and without prompts."""
    model = load_whole(folder).requires_grad_(False)
    span = load_span(folder, 1, 4, OPTIONS)
    hidden = span.shape.row_bytes // 4
    generator = torch.Generator().manual_seed(5)
    for lengths, count in ((LENGTHS, 0), ((9, 30), 3)):
        rows = [torch.randn(length, hidden, generator=generator) for length in lengths]
        wanted = [torch.randn(length, hidden, generator=generator) for length in lengths]
        prompts = torch.randn(2, count, hidden, generator=generator).requires_grad_()
        leaves = [each.clone().requires_grad_() for each in rows]
        outputs = [whole_blocks(model, 1, 3, each[None], prompts)[0] for each in leaves]
        right = torch.autograd.grad(
            outputs, [*leaves, prompts], wanted, allow_unused=True, materialize_grads=True
        )
        task = PassTask((1, 3), lengths, count)
        given = raw(*rows, prompts.detach())
        (found, _) = run_pass(span, task, given, part_rows)
        check(found, torch.cat(outputs))
        back = PassTask((1, 3), lengths, count, is_backward=True)
        found, of_prompts = run_pass(span, back, given + raw(*wanted), part_rows)
        check(found, torch.cat(right[:-1]))
        check(of_prompts, right[-1].view(-1, hidden))


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_half_precision_are_near(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_model(tmp_path, "llama")
    model = load_whole(folder).requires_grad_(False)
    name = str(dtype).removeprefix("torch.")
    span = load_span(folder, 0, 3, replace(OPTIONS, dtype=name))
    generator = torch.Generator().manual_seed(5)
    rows, wanted = (torch.randn(50, 64, generator=generator).to(dtype) for _ in range(2))
    prompts = torch.randn(3, 4, 64, generator=generator).to(dtype)
    leaf, soft = rows.float().requires_grad_(), prompts.float().requires_grad_()
    output = whole_blocks(model, 0, 3, leaf[None], soft)[0]
    right = torch.autograd.grad(output, [leaf, soft], wanted.float())
    task = PassTask((0, 3), (50,), 4, is_backward=True)
    data = b"".join(
        each.contiguous().view(torch.uint8).numpy().tobytes() for each in (rows, prompts, wanted)
    )
    running = span.start_pass(task, data, 16)
    while not running.advance():
        pass
    found = torch.frombuffer(bytearray(running.result()), dtype=dtype).view(-1, 64).float()
    for ours, theirs in zip(
        (found[:50], found[50:]), (right[0], right[1].view(-1, 64)), strict=True
    ):
        assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def check(found: Tensor, right: Tensor) -> None:
    assert found.shape == right.shape
    if found.numel():
        assert (found - right).abs().max() <= TOLERANCE * right.abs().max()
