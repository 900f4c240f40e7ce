"""Parts of a step that bound its memory compute the same as the whole: attention scores, sampling, tables of angles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from modelswarm.placement.memory import SAMPLE_BYTES, SCORE_BYTES, sample_rows, score_rows
from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.attention.attention import _capped_attention, _softmax_attention
from modelswarm_serving.model.attention.kv_cache import KvCache, KvCacheShape
from modelswarm_serving.model.attention.step_layout import StepLayout
from modelswarm_serving.model.base import BatchItem, SampleRequest
from modelswarm_serving.model.sampling.sampler import sample
from modelswarm_serving.model.transformer.rotary import Rotary
from modelswarm_serving.model.transformer.span import _sample_parts

HEADS, KEYS, SIZE, CAP = 8, 3000, 4, 50.0


def make_heads(count: int) -> Tensor:
    return torch.randn(1, HEADS, count, SIZE, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("masked", [True, False])
def test_capped_attention_in_parts_equals_the_whole(masked: bool) -> None:
    rows = 2 * score_rows(HEADS, KEYS) + 5
    keys = KEYS if masked else rows  # a causal step sees only its own rows
    query, key, value = make_heads(rows), make_heads(keys), make_heads(keys + 1)[:, :, 1:]
    mask = torch.zeros(1, 1, rows, keys).masked_fill_(
        torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1), float("-inf")
    )
    given = mask if masked else None
    parts = _softmax_attention(query, key, value, given, not masked, 0.5, CAP)
    whole = _capped_attention(query, key, value, mask, None, 0.5, CAP)
    assert torch.allclose(parts, whole, atol=1e-5)


def test_score_rows_keep_four_tables_below_the_limit() -> None:
    for heads, keys in ((8, 8192), (16, 100_000), (1, 1)):
        rows = score_rows(heads, keys)
        assert rows == 1 or rows * heads * keys * 16 <= SCORE_BYTES
    assert score_rows(64, 10_000_000) == 1


def test_sampling_in_parts_gives_the_same_tokens() -> None:
    vocab = 200_000
    rows = 2 * sample_rows(vocab) + 1
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    picks = [
        SampleRequest(Sampling(temperature=1.0, top_p=0.9, seed=index), 5, (1, 2, 3), begin=3)
        for index in range(rows)
    ]
    assert sample_rows(vocab) * vocab * 80 <= SAMPLE_BYTES
    assert _sample_parts(logits, picks) == sample(logits, picks)


def decode_layout(positions: list[int]) -> StepLayout:
    """Return the layout of a step of one row at each position."""
    cache = KvCache(KvCacheShape(1, 1, 16, 1, 8), torch.float32, torch.device("cpu"))
    pages = list(range(max(positions) // 16 + 1))
    return StepLayout(
        [BatchItem(pages, at, 1, (0, 1), [0], None, at, None) for at in positions], cache
    )


def test_angles_of_all_positions_are_the_models_own() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=16384)
    module: Any = LlamaRotaryEmbedding(config)
    rotary = Rotary(module, ["full_attention"], torch.float32)
    for last in (3, 256, 4095, 4096, 9999):  # in the first table, at its end, in several parts
        for positions in ([0, last // 2, last], [last]):
            cos, sin = rotary(decode_layout(positions))["full_attention"]
            expected_cos, expected_sin = module(torch.zeros(1), torch.tensor([positions]))
            assert torch.equal(cos[:, 0], expected_cos[0])
            assert torch.equal(sin[:, 0, 8:], expected_sin[0, :, 8:])
            assert torch.equal(sin[:, 0, :8], -expected_sin[0, :, :8])


def test_table_of_angles_is_no_longer_than_a_power_of_two() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=16384)
    module: Any = LlamaRotaryEmbedding(config)
    rotary = Rotary(module, ["full_attention"], torch.float32)
    rotary(decode_layout([4095]))
    assert len(rotary._tables[""][0]) == 4096
