"""Gradients through `model.model.layers[a:b]` equal those of transformers' own blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.processes.oracles import TAU
from torch import Tensor

from modelswarm.client.hf.errors import ArgumentError

MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]])


def states(batch: int = 3, length: int = 8, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, 128, generator=generator).requires_grad_()


def local(
    whole: Any, given: Tensor, first: int, last: int, prompts: Tensor | None = None
) -> Tensor:
    """Run blocks of transformers on states without padding."""
    body = whole.model
    places = torch.arange(given.shape[1])[None]
    angles = body.rotary_emb(given, places)
    hidden = given
    for index in range(first, last):
        if prompts is not None:
            rows = prompts.shape[-2]
            head = hidden[:, :rows] + prompts[index - first]
            hidden = torch.cat((head, hidden[:, rows:]), dim=1)
        hidden = body.layers[index](hidden, position_embeddings=angles)
    return hidden


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(
        (one - other).abs().max() < TAU * other.abs().max().clamp(min=1)
    )


def gradients(output: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    wanted = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    return list(torch.autograd.grad(output, leaves, wanted))


def test_gradients_equal_those_of_transformers(model: Any, toy_model: Any) -> None:
    """Petals' test_forward_backward_exact_match and test_remote_sequential: inside of a span, and over two."""
    layers = model.model.layers
    for first, last in ((1, 3), (0, 8), (3, 6)):
        ours, theirs = states(), states()
        output, right = layers[first:last](ours), local(toy_model, theirs, first, last)
        assert close(output, right), (first, last)
        (found,), (expected,) = gradients(output, [ours]), gradients(right, [theirs])
        assert close(found, expected), (first, last)


@pytest.mark.full
def test_gradients_of_deep_prompts_equal_a_local_loop(model: Any, toy_model: Any) -> None:
    """Petals' test_remote_sequential_prompts: prompts for all sequences, and for each."""
    for shape in ((6, 3, 128), (6, 3, 3, 128)):
        ours, theirs = states(), states()
        generator = torch.Generator().manual_seed(4)
        prompts = torch.randn(*shape, generator=generator).requires_grad_()
        output = model.model.layers[1:7](ours, prompts=prompts)
        right = local(toy_model, theirs, 1, 7, prompts)
        assert close(output, right), shape
        found, expected = gradients(output, [ours, prompts]), gradients(right, [theirs, prompts])
        assert all(map(close, found, expected)), shape


@pytest.mark.full
def test_padding_has_no_gradient(model: Any, toy_model: Any) -> None:
    """Padding on either side: each sequence is as by itself."""
    ours = states()
    output = model.model.layers(ours, MASK)
    (found,) = gradients(output, [ours])
    assert not bool(output[MASK == 0].any()) and not bool(found[MASK == 0].any())
    wanted = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    for row, mask in enumerate(MASK.bool()):
        alone = states()[row : row + 1, mask].detach().requires_grad_()
        right = local(toy_model, alone, 0, 8)
        assert close(output[row, mask], right[0]), row
        (expected,) = torch.autograd.grad(right, [alone], wanted[row : row + 1, mask])
        assert close(found[row, mask], expected[0]), row


@pytest.mark.full
def test_large_batch_runs_in_several_calls(
    model: Any, toy_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("modelswarm.client.training.autograd.BATCH_BYTES", 300 * 512)
    ours, theirs = states(7, 150), states(7, 150)
    output, right = model.model.layers(ours), local(toy_model, theirs, 0, 8)
    assert close(output, right)
    (found,), (expected,) = gradients(output, [ours]), gradients(right, [theirs])
    assert close(found, expected)


@pytest.mark.full
def test_adapter_between_ranges_trains(model: Any, toy_model: Any) -> None:
    """A module of the client between two ranges, and another behind them, as from a notebook of Petals."""
    torch.manual_seed(3)
    adapter, head = torch.nn.Linear(128, 128), torch.nn.Linear(128, 2)
    weights = [*adapter.parameters(), *head.parameters()]
    layers, hidden = model.model.layers, states().detach()
    output = head(layers[2:8](hidden + adapter(layers[0:2](hidden))))
    right = head(local(toy_model, hidden + adapter(local(toy_model, hidden, 0, 2)), 2, 8))
    assert close(output, right)
    found, expected = gradients(output, weights), gradients(right, weights)
    assert all(map(close, found, expected))


def test_second_backward_pass_is_an_error_of_torch(model: Any) -> None:
    ours = states(1)
    output = model.model.layers[0:1](ours).sum()
    torch.autograd.grad(output, [ours])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, [ours])


WRONG = [
    (torch.zeros(7, 2, 128), "the shape is"),
    (torch.zeros(8, 2, 127), "the shape is"),
    (torch.zeros(8, 2, 2, 128), "the shape is"),
    (torch.zeros(8, 0, 128), "the shape is"),
    (torch.zeros(8, 9, 128), "the shortest sequence has 8"),
    (torch.zeros(8, 2, 128, dtype=torch.int64), "the dtype is"),
    (torch.full((8, 2, 128), float("inf")), "infinite or NaN"),
    ([1.0], "a list"),
]


def test_wrong_prompts_are_refused_by_name(model: Any) -> None:
    for prompts, sentence in WRONG:
        with pytest.raises(ArgumentError, match=sentence) as refused:
            model.model.layers(states(), prompts=prompts)
        assert refused.value.field == "prompts"
    with pytest.raises(ArgumentError, match="the shortest sequence has 5"):
        model.model.layers(states(), MASK, torch.zeros(8, 6, 128))
