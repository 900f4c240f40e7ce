"""Rows that a span adds before its blocks: numbers of transformers with hooks, alone and in a mixed batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.chain import OPTIONS
from support.models.tiny_models import VOCAB, load_whole, make_model
from torch import Tensor

from modelswarm.checkpoint.families.table import FAMILIES
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import BatchItem, SampledToken, SampleRequest
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import load_span

CUTS = (0, 1, 4)
PAGES = 20  # of each prompt
TAU = 1e-4  # log probabilities of two computations in fp32 differ by 1e-5 at most


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma3", marks=pytest.mark.full)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def spans(folder: Path) -> list[TransformerSpan]:
    return [load_span(folder, first, last, OPTIONS) for first, last in pairwise(CUTS)]


@dataclass(frozen=True)
class Prompt:
    """Tokens, and what the blocks add at the first of them: [rows, blocks, hidden]."""

    tokens: list[int]
    added: Tensor
    page: int  # first of its own pages

    def item(self, first: int, last: int, blocks: tuple[int, int], rows: Any) -> BatchItem:
        """Return positions [first, last) of these blocks. The tail samples behind the last one."""
        is_end, is_tail = last == len(self.tokens), blocks[1] == CUTS[-1]
        pick = SampleRequest(Sampling(), last, self.tokens, 0) if is_end and is_tail else None
        return BatchItem(
            range(self.page, self.page + PAGES),
            first,
            last - first,
            blocks,
            None if blocks[0] else self.tokens[first:last],
            rows,
            last if is_tail else first,
            pick,
            prompts={
                at: self.added[at, slice(*blocks)].contiguous().numpy().tobytes()
                for at in range(first, min(last, len(self.added)))
            },
        )


def draw(length: int, rows: int, page: int) -> Prompt:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(1, VOCAB, (length,), generator=generator).tolist()
    return Prompt(tokens, torch.randn(rows, CUTS[-1], 64, generator=generator), page)


def run(
    spans: Sequence[TransformerSpan], prompts: Sequence[Prompt], chunk: int = 64
) -> list[SampledToken]:
    """Run the prompts together, `chunk` positions of each in a step."""
    found: dict[int, SampledToken] = {}
    for first in range(0, max(len(each.tokens) for each in prompts), chunk):
        running = [each for each in prompts if first < len(each.tokens)]
        rows: list[Any] = [None] * len(running)
        for span in spans:
            blocks = span.shape.first, span.shape.last
            ends = [min(first + chunk, len(each.tokens)) for each in running]
            items = zip(running, ends, rows, strict=True)
            results = span.step(
                [each.item(first, end, blocks, given) for each, end, given in items]
            )
            assert not any(result.error for result in results), results
            rows = [result.rows for result in results]
        found |= {
            id(each): result.sampled
            for each, result in zip(running, results, strict=True)
            if result.sampled is not None
        }
    return [found[id(each)] for each in prompts]


@contextmanager
def adding(whole: Any, added: Tensor) -> Iterator[None]:
    """Add [rows, blocks, hidden] before the blocks of transformers' model."""
    text = whole.config.get_text_config()
    layers = whole.get_submodule(FAMILIES[text.model_type].tables.blocks)

    def hook(place: int) -> Any:
        def add(_: Any, args: Any) -> Any:
            hidden = args[0].clone()
            hidden[:, : len(added)] += added[:, place]
            return (hidden, *args[1:])

        return add

    handles = [layer.register_forward_pre_hook(hook(at)) for at, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def expected(whole: Any, prompt: Prompt) -> tuple[int, float]:
    with adding(whole, prompt.added):
        logprobs = whole(torch.tensor([prompt.tokens])).logits[0, -1].log_softmax(-1)
    return int(logprobs.argmax()), float(logprobs.max())


PROMPTS = (draw(13, 5, 0), draw(21, 0, 20), draw(6, 6, 40), draw(33, 12, 60))


@pytest.mark.parametrize("chunk", [64, 4, 1])
def test_rows_are_added_before_each_block(
    folder: Path, spans: list[TransformerSpan], chunk: int
) -> None:
    """Sessions with and without such rows share steps, which end inside of the rows."""
    whole = load_whole(folder)
    found = run(spans, PROMPTS, chunk)
    for prompt, sampled in zip(PROMPTS, found, strict=True):
        token, logprob = expected(whole, prompt)
        assert sampled.token == token
        assert sampled.logprob == pytest.approx(logprob, abs=TAU)
        (alone,) = run(spans, [prompt], chunk)
        assert alone.token == token
        assert alone.logprob == pytest.approx(sampled.logprob, abs=TAU)


def test_rows_change_the_numbers(spans: list[TransformerSpan]) -> None:
    prompt = PROMPTS[0]
    for place in range(CUTS[-1]):
        added = prompt.added.clone()
        added[-1, place] += 1
        other, own = run(spans, [Prompt(prompt.tokens, added, PAGES), prompt])
        assert abs(other.logprob - own.logprob) > TAU, place


def test_rows_of_another_size_fail_alone(spans: list[TransformerSpan]) -> None:
    good = PROMPTS[0].item(0, 13, (0, 1), None)
    short = BatchItem(
        range(PAGES, 2 * PAGES), 0, 3, (0, 1), [1, 2, 3], None, 0, None, prompts={0: b"1234"}
    )
    wrong, right = spans[0].step([short, good])
    assert wrong.error == "prompts of 256 bytes are needed"
    assert right.error is None
