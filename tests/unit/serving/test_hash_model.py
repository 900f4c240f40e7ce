"""The hash model as an oracle: each test corrupts one part of the state and gets other tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from modelswarm.protocol.messages import Sampling
from modelswarm_serving.model.base import BatchItem, ModelShape, Result, SampleRequest
from modelswarm_serving.model.hash_model import HashModel, reference_tokens, sample_token

SHAPE = ModelShape(
    first=0,
    last=3,
    n_blocks=3,
    row_bytes=8,
    page_size=4,
    total_pages=16,
    max_length=64,
    vocab_size=1_000_003,
)
PROMPT = [5, 9, 2, 77, 31, 8, 8, 8, 60, 1]
PAGES = [3, 11, 7, 0]


def make_item(first: int, log: list[int], pages: list[int] = PAGES) -> BatchItem:
    """Return a batch item with the rows [first, end of the log) that samples one token."""
    return BatchItem(
        pages=pages,
        first=first,
        count=len(log) - first,
        blocks=(0, 3),
        tokens=log[first:],
        rows=None,
        emit_from=len(log),
        sample=SampleRequest(Sampling(), len(log), log, begin=len(PROMPT)),
    )


def read_token(result: Result) -> int:
    assert result.sampled is not None
    return result.sampled.token


def generate(
    model: HashModel, new: int, spoil: Callable[[HashModel], None] = lambda model: None
) -> list[int]:
    """Run the prompt, apply `spoil`, and generate `new` tokens."""
    log = list(PROMPT)
    log.append(read_token(model.step([make_item(0, log)])[0]))
    spoil(model)
    while len(log) < len(PROMPT) + new:
        log.append(read_token(model.step([make_item(len(log) - 1, log)])[0]))
    return log[len(PROMPT) :]


def expect_tokens(new: int) -> list[int]:
    return reference_tokens(PROMPT, Sampling(), new, 64, n_blocks=3, vocabulary=SHAPE.vocab_size)


def test_paged_steps_equal_the_reference() -> None:
    assert generate(HashModel(SHAPE), 5) == expect_tokens(5)


def test_tokens_are_independent_of_the_chunks() -> None:
    for cut in range(1, len(PROMPT)):
        model = HashModel(SHAPE)
        model.step([replace(make_item(0, PROMPT[:cut]), sample=None)])
        assert read_token(model.step([make_item(cut, PROMPT)])[0]) == expect_tokens(1)[0]


@pytest.mark.parametrize("block", range(3))
@pytest.mark.parametrize("position", range(len(PROMPT)))
def test_changed_kv_slot_changes_later_tokens(block: int, position: int) -> None:
    def spoil(model: HashModel) -> None:
        page = PAGES[position // 4]
        model._kv[block][page][position % 4] ^= 1

    got, want = generate(HashModel(SHAPE), 4, spoil), expect_tokens(4)
    assert got[0] == want[0]
    assert all(one != other for one, other in zip(got[1:], want[1:], strict=True))


def test_overwritten_page_changes_later_tokens() -> None:
    def spoil(model: HashModel) -> None:
        model.step([make_item(0, [1, 2, 3, 4, 5], pages=[11, 12])])  # page 11 is in use

    assert generate(HashModel(SHAPE), 3, spoil)[1:] != expect_tokens(3)[1:]


def test_repeated_missing_or_moved_row_changes_the_token() -> None:
    for log in (PROMPT[:4] + PROMPT[3:], PROMPT[:4] + PROMPT[5:], PROMPT[::-1]):
        assert read_token(HashModel(SHAPE).step([make_item(0, log)])[0]) != expect_tokens(1)[0]


def test_stale_log_changes_the_token() -> None:
    stale = [*PROMPT[:2], 3, *PROMPT[3:]]
    stale_item = replace(
        make_item(0, PROMPT), sample=SampleRequest(Sampling(), len(PROMPT), stale, len(PROMPT))
    )
    assert read_token(HashModel(SHAPE).step([stale_item])[0]) != expect_tokens(1)[0]


def test_changed_byte_of_a_wide_row_changes_its_output() -> None:
    wide = replace(SHAPE, first=1, row_bytes=32)
    row = bytes(range(8)) * 4
    for at in range(32):
        model = HashModel(wide)
        whole = BatchItem([0], 0, 1, (1, 2), None, row, 0, None)
        damaged = bytearray(row)
        damaged[at] ^= 1
        good, bad = model.step([whole, replace(whole, rows=bytes(damaged))])
        assert good.rows != bad.rows


INVALID_ITEMS: list[dict[str, object]] = [
    {"count": 0},
    {"count": 3},
    {"pages": [1]},
    {"blocks": (0, 4)},
    {"blocks": (1, 3)},
    {"rows": bytes(80)},
    {"emit_from": 11},
    {"tokens": None},
    {"sample": SampleRequest(Sampling(), 9, PROMPT[:9], begin=9)},
]


@pytest.mark.parametrize("changes", INVALID_ITEMS)
def test_invalid_batch_item_raises_value_error(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        HashModel(SHAPE).step([replace(make_item(0, PROMPT), **changes)])  # type: ignore[arg-type]


def test_row_size_must_be_whole_words() -> None:
    with pytest.raises(ValueError, match="row_bytes is 12"):
        HashModel(replace(SHAPE, row_bytes=12))


def test_each_sampling_rule_and_the_begin_change_the_tokens() -> None:
    log, size = (1, 2, 3, 4), 1 << 30
    ruled = [
        Sampling(typical_p=0.5),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=0.5),
        Sampling(no_repeat_ngram_size=2),
        Sampling(logit_bias=((1, 0.5),)),
        Sampling(bad_words=((1,),)),
        Sampling(min_tokens=1),
    ]
    tokens = {
        sample_token(7, sampling, 4, log, begin, size).token
        for sampling in ruled
        for begin in (2, 3)
    }
    plain = sample_token(7, Sampling(), 4, log, 2, size).token
    assert len(tokens | {plain}) == 2 * len(ruled) + 1


def test_allowed_and_minimum_tokens_hold_in_the_hash_model() -> None:
    few = Sampling(allowed_tokens=(3, 5, 9), eos=(3, 5), min_tokens=4)
    tokens = reference_tokens(PROMPT, few, 30, 64, n_blocks=3, vocabulary=SHAPE.vocab_size)
    assert tokens[:4] == [9] * 4
    assert tokens[-1] in (3, 5)
    assert set(tokens[4:-1]) <= {9}
