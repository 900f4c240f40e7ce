"""Families that run by transformers' own forward: every split, replay and move gives the tokens of the whole model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.chain import OPTIONS, Chain, Stream, load_chain
from support.models.tiny_models import EOS, GENERIC, VOCAB, load_whole, make_model

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import BatchItem, KvRead, KvWrite, SampleRequest
from modelswarm_serving.model.transformer.startup import load_span

SPLITS = ((0, 4), (0, 2, 4), (0, 1, 2, 3, 4))
PROMPTS = (13, 5, 21, 1, 33)
NEW = 12
FAST = frozenset({"mixtral", "granite", "gpt2", "bloom", "falcon_new", "gpt_oss", "deepseek_v3"})
"""One of each kind: experts, scaled rows, learned positions, ALiBi, own attention, sinks and windows, latents."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=() if f in FAST else pytest.mark.full) for f in GENERIC],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Return prompts and what greedy `generate` of the whole model adds to them."""
    model = load_whole(folder)
    found = [
        model.generate(  # type: ignore[operator]
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=EOS
        )[0].tolist()
        for prompt in prompts()
    ]
    assert sum(map(len, found)) > sum(PROMPTS) + 3 * NEW  # most do not end early
    return found


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]


def generate(chain: Chain, count: int = NEW, chunk: int = 512) -> list[Stream]:
    streams = [Stream(prompt) for prompt in prompts()]
    chain.generate(streams, count, chunk=chunk, eos=EOS)
    return streams


def test_tokens_equal_generate_for_every_split(folder: Path, expected: list[list[int]]) -> None:
    for cuts in SPLITS:
        chain = load_chain(folder, cuts)
        alone = Stream(prompts()[0])
        chain.generate([alone], NEW, eos=EOS)
        assert alone.log == expected[0], cuts
        assert [stream.log for stream in generate(chain)] == expected, cuts


def test_chunked_prefill_on_scattered_pages_is_equal(
    folder: Path, expected: list[list[int]]
) -> None:
    chain = load_chain(folder, (0, 3, 4), seed=3)
    assert [stream.log for stream in generate(chain, chunk=7)] == expected


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_replayed_span_continues_with_equal_tokens(
    folder: Path, expected: list[list[int]], lost: int
) -> None:
    """Another span object takes the place of one in the middle of all streams."""
    cuts = (0, 1, 3, 4)
    chain = load_chain(folder, cuts)
    streams = generate(chain, count=5)
    chain.replay(lost, load_span(folder, cuts[lost], cuts[lost + 1], OPTIONS), streams)
    chain.generate(streams, NEW - 5, eos=EOS)
    assert [stream.log for stream in streams] == expected


def test_copied_kv_gives_the_same_next_token(folder: Path) -> None:
    """R13 (migration): another server writes what was read here, into other pages."""
    old, new = (load_span(folder, 0, 4, OPTIONS) for _ in range(2))
    tokens = prompts()[0]
    there, pages, n = range(8), [9, 3, 11, 5], len(tokens) - 1
    old.step([BatchItem(there, 0, n, (0, 4), tokens[:n], None, n, None)])
    (read,) = old.step([KvRead(there, 0, n, (0, 4))])
    assert read.rows is not None and len(read.rows) == n * 4 * old.shape.kv_bytes
    new.step([KvWrite(pages, 0, n, (0, 4), read.rows)])
    pick = SampleRequest(Sampling(), n + 1, tokens, begin=0)
    last = BatchItem(there, n, 1, (0, 4), tokens[n:], None, n + 1, pick)
    assert new.step([replace(last, pages=pages)]) == old.step([last])


def test_blocks_behind_the_entrance_take_rows(folder: Path, expected: list[list[int]]) -> None:
    """A route may use the first server's later blocks only: nothing is embedded there a second time."""
    span = load_span(folder, 0, 4, OPTIONS)
    tokens = prompts()[0]
    (first,) = span.step([BatchItem(range(8), 0, len(tokens), (0, 2), tokens, None, 0, None)])
    pick = SampleRequest(Sampling(), len(tokens), tokens, begin=0)
    tail = BatchItem(range(8), 0, len(tokens), (2, 4), None, first.rows, len(tokens), pick)
    (second,) = span.step([tail])
    assert second.sampled is not None
    assert second.sampled.token == expected[0][len(tokens)]


def test_bfloat16_stays_close_to_float32(folder: Path) -> None:
    exact = load_chain(folder, (0, 2, 4))
    rough = load_chain(folder, (0, 2, 4), options=replace(OPTIONS, dtype="bfloat16"))
    one, other = Stream(prompts()[0]), Stream(prompts()[0])
    exact.generate([one], 1)
    rough.generate([other], 1)
    assert other.picked[0].logprob == pytest.approx(one.picked[0].logprob, abs=0.7)


@pytest.mark.parametrize("family", ["bloom", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("seed", [None, 5])
def test_small_tables_of_scores_and_single_rows_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, seed: int | None
) -> None:
    """Long contexts attend by a few rows at once, and decode rows one by one; forced here."""
    make_model(tmp_path, family)
    whole = [stream.log for stream in generate(load_chain(tmp_path, (0, 4)))]
    monkeypatch.setattr("modelswarm.placement.memory.SCORE_BYTES", 4000)
    monkeypatch.setattr("modelswarm_serving.model.attention.step_layout.GATHER_LIMIT", 0)
    streams = generate(load_chain(tmp_path, (0, 4), seed=seed), chunk=11)
    assert [stream.log for stream in streams] == whole
