"""Rows with LoRA adapters: tokens equal those of peft's whole model, for every family, split and mix of adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.adapters import generate_with, make_adapter
from support.models.chain import OPTIONS, Chain, Stream, load_chain
from support.models.tiny_models import EOS, FUSED, GENERIC, VOCAB, make_model

from modelswarm_serving.model.base import BatchItem
from modelswarm_serving.model.transformer.startup import SpanOptions, load_span

NEW = 10
SPLITS = ((0, 4), (0, 1, 4))
FAST = frozenset({"llama", "gpt2", "bloom", "mixtral", "deepseek_v3"})
ADAPTERS = ("", "a", "b")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(f, marks=() if f in FAST else pytest.mark.full) for f in (*FUSED, *GENERIC)
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def options(folder: Path) -> SpanOptions:
    adapters = {
        "a": make_adapter(folder, folder / "a", seed=1),
        "b": make_adapter(folder, folder / "b", seed=2, rank=2, use_rslora=True),
    }
    return replace(OPTIONS, adapters=adapters)


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    sizes = [13, 5, 21, 1, 9, 17][:count]
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in sizes]


def test_tokens_of_mixed_adapters_equal_peft(folder: Path, options: SpanOptions) -> None:
    names = [ADAPTERS[at % 3] for at in range(6)]
    expected = []
    for name, prompt in zip(names, prompts(6), strict=True):
        adapter = options.adapters[name] if name else None
        expected += generate_with(folder, adapter, [prompt], NEW)
    assert len({tuple(log[-NEW:]) for log in expected}) == 6
    for cuts in SPLITS:
        chain = load_chain(folder, cuts, options=options)
        streams = [
            Stream(prompt, adapter=name) for name, prompt in zip(names, prompts(6), strict=True)
        ]
        chain.generate(streams, NEW, chunk=8, eos=EOS)
        assert [stream.log for stream in streams] == expected, cuts


def test_adapter_changes_what_the_model_says(folder: Path, options: SpanOptions) -> None:
    (prompt,) = prompts(1)
    plain, a, b = (
        generate_with(folder, options.adapters[name] if name else None, [prompt], NEW)
        for name in ADAPTERS
    )
    assert plain != a != b != plain


def test_rows_without_adapter_are_bit_equal(folder: Path, options: SpanOptions) -> None:
    """The same step on a server without adapters gives the same bytes for the rows that have none."""
    items = [
        BatchItem(range(at * 6, at * 6 + 6), 0, len(prompt), (0, 2), prompt, None, 0, None)
        for at, prompt in enumerate(prompts(6))
    ]
    plain = load_span(folder, 0, 2, OPTIONS)
    mixed = load_span(folder, 0, 2, options)
    named = [replace(item, adapter=ADAPTERS[at % 3]) for at, item in enumerate(items)]
    before, after = plain.step(items), mixed.step(named)
    has_experts = any("expert" in key for key in json.loads((folder / "config.json").read_text()))
    for at in range(6):
        is_named = at % 3 > 0
        if is_named or not has_experts:  # rows that share an expert share the sums of its product
            assert (before[at].rows != after[at].rows) == is_named, at


def test_unknown_adapter_fails_its_own_session_only(folder: Path, options: SpanOptions) -> None:
    span = load_span(folder, 0, 2, options)
    items = [
        BatchItem(
            range(at * 6, at * 6 + 6), 0, 5, (0, 2), [1, 2, 3, 4, 5], None, 0, None, adapter=n
        )
        for at, n in enumerate(("a", "c"))
    ]
    good, bad = span.step(items)
    assert good.error is None and good.rows
    assert bad.error == "there is no adapter c here"


def test_replayed_adapter_session_goes_on_with_equal_tokens(
    folder: Path, options: SpanOptions
) -> None:
    """The second span is lost in the middle, and rebuilt from the rows of the first."""
    (prompt,) = prompts(1)
    (expected,) = generate_with(folder, options.adapters["a"], [prompt], NEW)
    chain: Chain = load_chain(folder, (0, 2, 4), options=options)
    stream = Stream(prompt, adapter="a")
    chain.generate([stream], 4, eos=EOS)
    chain.replay(1, load_span(folder, 2, 4, options), [stream])
    chain.generate([stream], NEW - 4, eos=EOS)
    assert stream.log == expected
