"""Spans compute what transformers computes with the whole model, and picks do not depend on the split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.models.chain import OPTIONS, Chain, Stream, load_chain
from support.models.margins import margin
from support.models.tiny_models import EOS, FUSED, VOCAB, load_whole, make_model
from transformers import PreTrainedModel

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import (
    BatchItem,
    KvCopy,
    KvRead,
    KvWrite,
    Result,
    SampledToken,
    SampleRequest,
    ScoreRequest,
)
from modelswarm_serving.model.sampling.sampler import sample
from modelswarm_serving.model.transformer.span import TransformerSpan
from modelswarm_serving.model.transformer.startup import load_span

SPLITS = ((0, 4), (0, 2, 4), (0, 1, 2, 3, 4))
PROMPTS = (13, 5, 21, 1, 33, 8, 2, 17)
NEW = 16
TAU = 1e-4  # logits of two computations in fp32 differ by 1e-5 at most
SAMPLINGS = (
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_k=20, seed=2),
    Sampling(temperature=1.2, top_p=0.9, seed=3),
    Sampling(temperature=1.0, min_p=0.05, seed=4),
    Sampling(temperature=0.9, top_k=50, top_p=0.8, min_p=0.01, seed=5),
    Sampling(temperature=1.0, top_k=10, repetition_penalty=1.3, seed=6),
    Sampling(repetition_penalty=1.5),
    Sampling(temperature=1.5, seed=(1 << 64) - 1, choice=3),
)


FAST = ("llama", "gemma3")  # the plainest, and one with every special feature


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=() if f in FAST else pytest.mark.full) for f in FUSED],
)
def family_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    family = str(request.param)
    return make_model(tmp_path_factory.mktemp(family), family)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("llama"), "llama")


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(1, VOCAB, (n,), generator=generator).tolist() for n in PROMPTS]


def reference(model: PreTrainedModel, prompt: list[int], count: int = NEW) -> list[int]:
    """Return prompt and greedy `generate` of transformers, up to the end token."""
    out = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]), do_sample=False, max_new_tokens=count, pad_token_id=EOS
    )
    tokens: list[int] = out[0].tolist()
    return tokens


def test_greedy_tokens_equal_transformers_for_every_split(family_folder: Path) -> None:
    model = load_whole(family_folder)
    expected = [reference(model, prompt) for prompt in prompts()]
    assert sum(map(len, expected)) > sum(PROMPTS) + 5 * NEW  # most do not end early
    for cuts in SPLITS:
        chain = load_chain(family_folder, cuts)
        alone = Stream(prompts()[0])
        chain.generate([alone], NEW, eos=EOS)
        assert alone.log == expected[0], cuts
        streams = [Stream(prompt) for prompt in prompts()]
        chain.generate(streams, NEW, eos=EOS)
        assert [stream.log for stream in streams] == expected, cuts


def test_chunked_prefill_and_scattered_pages_change_no_token(family_folder: Path) -> None:
    """Chunks end at different steps, so prefill and decode rows share steps."""
    model = load_whole(family_folder)
    expected = [reference(model, prompt) for prompt in prompts()]
    chain: Chain = load_chain(family_folder, (0, 2, 4), seed=3)
    for chunk in (7, 16):
        streams = [Stream(prompt) for prompt in prompts()]
        chain.generate(streams, NEW, chunk=chunk, eos=EOS)
        assert [stream.log for stream in streams] == expected, chunk


def test_replayed_span_continues_with_equal_tokens(family_folder: Path) -> None:
    """Another span object takes the place of one in the middle of all streams: head, middle and tail in turn."""
    model, cuts = load_whole(family_folder), (0, 1, 3, 4)
    expected = [reference(model, prompt) for prompt in prompts()]
    for lost in range(3):
        chain = load_chain(family_folder, cuts)
        streams = [Stream(prompt) for prompt in prompts()]
        chain.generate(streams, 5, eos=EOS)
        other = load_span(family_folder, cuts[lost], cuts[lost + 1], OPTIONS)
        chain.replay(lost, other, streams)
        chain.generate(streams, NEW - 5, eos=EOS)
        assert [stream.log for stream in streams] == expected, lost


def test_rows_attended_singly_equal_gathered_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long sessions are not in the padded batch. The test forces this, on adjacent and on scattered pages."""
    expected = [reference(load_whole(folder), prompt) for prompt in prompts()]
    monkeypatch.setattr("modelswarm_serving.model.attention.step_layout.GATHER_LIMIT", 0)
    for seed in (None, 5):
        chain = load_chain(folder, (0, 4), seed=seed)
        streams = [Stream(prompt) for prompt in prompts()]
        chain.generate(streams, NEW, eos=EOS)
        assert [stream.log for stream in streams] == expected


def test_biases_of_every_projection_are_used(tmp_path: Path) -> None:
    make_model(tmp_path, "llama", attention_bias=True, mlp_bias=True)
    model, chain = load_whole(tmp_path), load_chain(tmp_path, (0, 2, 4))
    streams = [Stream(prompt) for prompt in prompts()]
    chain.generate(streams, NEW, eos=EOS)
    assert [stream.log for stream in streams] == [reference(model, p) for p in prompts()]


@pytest.mark.parametrize("cuts", SPLITS)
def test_seeded_sampling_ignores_split_and_batch_mix(folder: Path, cuts: tuple[int, ...]) -> None:
    """A session alone on one span equals the same session among others on several spans, except for near ties."""
    whole, chain = load_chain(folder, (0, 4)), load_chain(folder, cuts)
    alone = [Stream(prompt, s) for prompt, s in zip(prompts(), SAMPLINGS, strict=True)]
    together = [Stream(prompt, s) for prompt, s in zip(prompts(), SAMPLINGS, strict=True)]
    for stream in alone:
        whole.generate([stream], NEW)
    chain.generate(together, NEW, chunk=9)
    model = load_whole(folder)
    for one, other in zip(alone, together, strict=True):
        equal = equal_until_near_tie(model, one, other)
        assert equal > NEW // 2


def equal_until_near_tie(model: PreTrainedModel, one: Stream, other: Stream) -> int:
    """Return the number of generated tokens that agree before the first pick that rounding may decide."""
    start = len(one.log) - NEW
    logits = model(torch.tensor([one.log])).logits[0].detach()
    for position in range(start, len(one.log)):
        pick = SampleRequest(one.sampling, position, one.log[:position], one.begin)
        room = margin(logits[position - 1], pick)
        if room <= TAU:
            return position - start
        assert one.log[position] == other.log[position], (position, room)
        a, b = one.picked[position - start], other.picked[position - start]
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
    return NEW


def test_every_sampled_token_is_the_whole_models_pick(folder: Path) -> None:
    """Oracle 2: the picks of transformers' model and our sampler on the same log, teacher-forced."""
    chain = load_chain(folder, (0, 1, 4))
    streams = [Stream(prompt, s) for prompt, s in zip(prompts(), SAMPLINGS, strict=True)]
    chain.generate(streams, NEW)
    model = load_whole(folder)
    for stream in streams:
        logits = model(torch.tensor([stream.log])).logits[0].detach()
        for position in range(len(stream.log) - NEW, len(stream.log)):
            row = logits[position - 1]
            pick = SampleRequest(stream.sampling, position, stream.log[:position], stream.begin)
            (picked,) = sample(row[None], [pick])
            right = isinstance(picked, SampledToken) and picked.token == stream.log[position]
            assert right or margin(row, pick) <= TAU


def test_a_part_of_a_span_computes_that_part(folder: Path) -> None:
    """A route may use only some of a server's blocks; several ranges share one step."""
    span = load_span(folder, 0, 4, OPTIONS)
    tokens = prompts()[0]
    head = BatchItem(range(8), 0, len(tokens), (0, 2), tokens, None, 0, None)
    (first,) = span.step([head])
    assert first.rows is not None
    pick = SampleRequest(Sampling(), len(tokens), tokens, begin=0)
    tail = BatchItem(range(8), 0, len(tokens), (2, 4), None, first.rows, len(tokens), pick)
    other = BatchItem(range(8, 16), 0, len(tokens), (0, 4), tokens, None, len(tokens), pick)
    second, third = span.step([tail, other])
    expected = reference(load_whole(folder), tokens, 1)[-1]
    assert second.sampled is not None and third.sampled is not None
    assert second.sampled.token == third.sampled.token == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copied_kv_goes_on_bit_for_bit(folder: Path, dtype: str) -> None:
    """R13 (migration): another server writes the KV read here, into other pages, and in parts."""
    options = replace(OPTIONS, dtype=dtype)
    old, whole, part = (load_span(folder, 0, 4, options) for _ in range(3))
    tokens = prompts()[0]
    there, n = range(8), len(tokens) - 1
    old.step([BatchItem(there, 0, n, (0, 4), tokens[:n], None, n, None)])
    pages, pick = [9, 3, 11, 5, 2, 7, 1, 12], SampleRequest(Sampling(), n + 1, tokens, begin=0)
    for first, count in ((0, 5), (5, n - 5)):
        (read,) = old.step([KvRead(there, first, count, (0, 4))])
        assert read.rows is not None
        assert len(read.rows) == count * 4 * old.shape.kv_bytes
        assert whole.step([KvWrite(pages, first, count, (0, 4), read.rows)]) == [Result()]
    for blocks in ((0, 1), (1, 4)):
        (read,) = old.step([KvRead(there, 0, n, blocks)])
        assert read.rows is not None
        part.step([KvWrite(pages, 0, n, blocks, read.rows)])
    last = BatchItem(there, n, 1, (0, 4), tokens[n:], None, n + 1, pick)
    (expected,) = old.step([last])
    assert whole.step([replace(last, pages=pages)]) == [expected]
    assert part.step([replace(last, pages=pages)]) == [expected]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_forked_kv_goes_on_bit_for_bit(folder: Path, dtype: str) -> None:
    """R15 (forks): KV is copied into other pages of the same server, and in parts."""
    span = load_span(folder, 0, 4, replace(OPTIONS, dtype=dtype))
    tokens = prompts()[0]
    there, n = range(8), len(tokens) - 1
    span.step([BatchItem(there, 0, n, (0, 4), tokens[:n], None, n, None)])
    pages, pick = (
        [29, 23, 31, 25, 22, 27, 21, 12],
        SampleRequest(Sampling(), n + 1, tokens, begin=0),
    )
    for first, count in ((0, 5), (5, n - 5)):
        assert span.step([KvCopy(there, pages, first, count, (0, 4))]) == [Result()]
    last = BatchItem(there, n, 1, (0, 4), tokens[n:], None, n + 1, pick)
    (expected,) = span.step([last])
    assert span.step([replace(last, pages=pages)]) == [expected]


def test_fork_from_missing_pages_is_refused(folder: Path) -> None:
    span = load_span(folder, 0, 2, OPTIONS)
    short, unknown = KvCopy([0], range(8), 0, 9, (0, 2)), KvCopy([9_999], range(8), 0, 2, (0, 2))
    first, second = span.step([short, unknown])
    assert "1 pages do not hold" in str(first.error)
    assert "pages must be within" in str(second.error)


def test_kv_of_another_length_is_refused_alone(folder: Path) -> None:
    span = load_span(folder, 0, 2, OPTIONS)
    tokens = prompts()[0]
    wrong = KvWrite(range(8), 0, 2, (0, 2), bytes(7))
    missing = KvRead(range(8), 0, 10_000, (0, 2))
    good = BatchItem(range(8, 16), 0, len(tokens), (0, 2), tokens, None, 0, None)
    results = span.step([wrong, missing, good])
    assert "7 bytes of KV" in str(results[0].error) and "not within" in str(results[1].error)
    assert results[2].error is None and results[2].rows


def test_prompt_scores_equal_the_whole_models(folder: Path) -> None:
    """A chunk that only scores shares its step with one that also samples."""
    whole, span = load_whole(folder), load_span(folder, 0, 4, OPTIONS)
    size = span.shape.page_size
    one, two = prompts()[4], prompts()[2]
    items, page = [], 0
    for prompt, scored, samples in ((one, 20, False), (two, len(two) - 1, True)):
        pages = list(range(page, page + -(-len(prompt) // size)))
        page += len(pages)
        request = SampleRequest(Sampling(), len(prompt), prompt, 0) if samples else None
        score = ScoreRequest(prompt[1 : 1 + scored], 3)
        blocks, end = (0, 4), len(prompt)
        items.append(BatchItem(pages, 0, end, blocks, prompt, None, end, request, score))
    results = span.step(items)
    assert [result.error for result in results] == [None, None]
    assert results[0].sampled is None and results[1].sampled is not None
    for prompt, result in zip((one, two), results, strict=True):
        with torch.no_grad():
            logprobs = whole(torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert result.scores
        for row, found in enumerate(result.scores):
            assert found.token == prompt[row + 1]
            assert abs(found.logprob - logprobs[row, found.token].item()) < TAU
            best = torch.topk(logprobs[row], 3).values.tolist()
            assert [top.logprob for top in found.top] == pytest.approx(best, abs=TAU)


def test_only_the_wanted_rows_come_back(folder: Path) -> None:
    span = load_span(folder, 0, 2, OPTIONS)
    tokens = prompts()[0]
    results = span.step(
        [
            BatchItem(range(8), 0, len(tokens), (0, 2), tokens, None, emit, None)
            for emit in (0, 5, len(tokens))
        ]
    )
    whole, part, nothing = (result.rows for result in results)
    assert whole is not None and part is not None
    assert bytes(whole[5 * span.shape.row_bytes :]) == bytes(part)
    assert nothing is None


def test_a_work_that_cannot_run_fails_alone(folder: Path) -> None:
    span: TransformerSpan = load_span(folder, 0, 4, replace(OPTIONS, max_length=64))
    good = BatchItem(
        (0, 1), 0, 3, (0, 4), (1, 2, 3), None, 3, SampleRequest(Sampling(), 3, (1, 2, 3), 0)
    )
    bad = {
        "tokens must be within 0:320": replace(good, tokens=(1, 2, VOCAB)),
        "3 tokens are needed, not 2": replace(good, tokens=(1, 2)),
        "blocks 0:5 are not within 0:4": replace(good, blocks=(0, 5)),
        "positions 62+3 are not within 0:64": replace(good, first=62, pages=range(40)),
        "1 pages do not hold 6 positions": replace(good, first=3, pages=(7,)),
        "pages must be within 0:256": replace(good, pages=(256,)),
        "tokens enter at block 0, rows at every other": replace(good, blocks=(1, 4)),
        "3 rows of 256 bytes are needed": replace(good, blocks=(1, 4), tokens=None, rows=b"x"),
    }
    results = span.step([good, *bad.values(), replace(good, pages=(2, 3))])
    assert [result.error for result in results[1:-1]] == list(bad)
    assert results[0].error is None and results[0].sampled == results[-1].sampled


def test_bfloat16_runs_and_stays_close(family_folder: Path) -> None:
    """bf16 gives no equality; the logprob of the first token is near that of fp32."""
    exact = load_chain(family_folder, (0, 2, 4))
    rough = load_chain(family_folder, (0, 2, 4), options=replace(OPTIONS, dtype="bfloat16"))
    assert rough.spans[0].shape.row_bytes == exact.spans[0].shape.row_bytes // 2
    one, other = Stream(prompts()[0]), Stream(prompts()[0])
    exact.generate([one], 1)
    rough.generate([other], 1)
    assert other.picked[0].logprob == pytest.approx(one.picked[0].logprob, abs=0.5)
