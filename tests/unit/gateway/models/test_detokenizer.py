"""Tokens become text with whole characters and correct spaces, independent of timing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.gateway_service import turns_of_another_task
from support.models.tokenizers import BYTES_FROM, byte_level, encode_bytes, sentencepiece_like
from tokenizers import Tokenizer

from modelswarm_gateway.models.detokenizer import (
    MAX_WITHHELD_TOKENS,
    TOKENS_AT_ONCE,
    Detokenizer,
    detokenize_all,
)


def feed_tokens(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, before)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def find_ids(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return [token for token in found if token is not None]


def find_byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return find_ids(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語", "👩‍👩‍👧 and 🏴", "a\n\tb  c ", " lead"]
)
def test_bytes_decode_to_the_original_text(text: str) -> None:
    got = feed_tokens(byte_level(), encode_bytes(text))
    assert "".join(got) == text


def test_character_is_shown_only_when_complete() -> None:
    assert feed_tokens(byte_level(), encode_bytes("é€😀!")) == [
        "",
        "é",
        "",
        "",
        "€",
        "",
        "",
        "",
        "😀",
        "!",
        "",
    ]


def test_incomplete_last_character_becomes_a_replacement_sign() -> None:
    assert feed_tokens(byte_level(), encode_bytes("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_do_not_delay_later_text() -> None:
    invalid = [BYTES_FROM + 0xFF] * 5
    got = feed_tokens(byte_level(), [*invalid, *encode_bytes("ok")])
    assert "".join(got) == "\ufffd" * 5 + "ok"
    assert got[-2] == "k"


def test_endless_invalid_bytes_are_all_shown() -> None:
    tokenizer = sentencepiece_like()
    invalid = find_ids(tokenizer, "<0xFF>") * (4 * MAX_WITHHELD_TOKENS)
    got = feed_tokens(tokenizer, invalid)
    assert "".join(got) == "\ufffd" * len(invalid)


def test_leading_space_is_kept_only_after_a_prompt() -> None:
    tokenizer = sentencepiece_like()
    hello, world = find_ids(tokenizer, "▁Hello", "▁world")
    assert "".join(feed_tokens(tokenizer, [world], before=[hello])) == " world"
    assert "".join(feed_tokens(tokenizer, [hello, world])) == "Hello world"


def test_byte_fallback_characters_are_complete_between_words() -> None:
    tokenizer = sentencepiece_like()
    ids = [
        *find_ids(tokenizer, "▁Hello"),
        *find_byte_ids(tokenizer, "世界"),
        *find_ids(tokenizer, "▁world", "!"),
    ]
    assert feed_tokens(tokenizer, ids) == ["Hello", "", "", "世", "", "", "界", " world", "!", ""]


def test_special_tokens_are_hidden() -> None:
    tokenizer = sentencepiece_like()
    ids = find_ids(tokenizer, "▁Hello", "</s>", "▁world")
    assert "".join(feed_tokens(tokenizer, ids)) == "Hello world"


def test_character_split_by_the_prompt_end_is_shown_whole() -> None:
    euro = encode_bytes("€")
    assert (
        "".join(feed_tokens(byte_level(), euro[2:], before=[*encode_bytes("ab"), *euro[:2]])) == "€"
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_decode_as_if_decoded_at_once(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("aé€😀 \n") for _ in range(40))
    ids = encode_bytes(text)
    for _ in range(seed % 5):
        ids.insert(rng.randrange(len(ids)), BYTES_FROM + rng.randrange(256))
    assert "".join(feed_tokens(byte_level(), ids)) == byte_level().decode(ids)


async def test_other_tasks_run_while_a_long_text_is_decoded() -> None:
    """A prompt that is echoed may have 128,000 tokens."""
    text, pieces = "é€😀 " * 300, list[str]()

    async def decode() -> None:
        pieces.extend(await detokenize_all(Detokenizer(byte_level()), encode_bytes(text)))

    turns = await turns_of_another_task(decode())
    assert "".join(pieces) == text
    assert turns >= len(pieces) // TOKENS_AT_ONCE > 3
