"""Tokens become text without half a character, with the right spaces, and the same whatever the timing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from support.models.tokenizers import BYTES_FROM, byte_level, encode_bytes, sentencepiece_like
from tokenizers import Tokenizer

from modelswarm_gateway.models.detokenizer import MAX_WITHHELD_TOKENS, Detokenizer


def pieces(tokenizer: Tokenizer, ids: Sequence[int], before: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(tokenizer, before)
    return [*(detokenizer.feed(token) for token in ids), detokenizer.flush()]


def ids_of(tokenizer: Tokenizer, *tokens: str) -> list[int]:
    found = [tokenizer.token_to_id(token) for token in tokens]
    assert None not in found
    return [token for token in found if token is not None]


def fallback(tokenizer: Tokenizer, text: str) -> list[int]:
    return ids_of(tokenizer, *(f"<0x{byte:02X}>" for byte in text.encode()))


@pytest.mark.parametrize(
    "text", ["plain", "naïve café", "日本語", "👩‍👩‍👧 and 🏴", "a\n\tb  c ", " lead"]
)
def test_bytes_decode_to_the_original_text(text: str) -> None:
    got = pieces(byte_level(), encode_bytes(text))
    assert "".join(got) == text


def test_character_is_shown_only_when_complete() -> None:
    assert pieces(byte_level(), encode_bytes("é€😀!")) == [
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
    assert pieces(byte_level(), encode_bytes("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_invalid_bytes_do_not_delay_later_text() -> None:
    bad = [BYTES_FROM + 0xFF] * 5
    got = pieces(byte_level(), [*bad, *encode_bytes("ok")])
    assert "".join(got) == "\ufffd" * 5 + "ok"
    assert got[-2] == "k"


def test_endless_invalid_bytes_are_all_shown() -> None:
    tokenizer = sentencepiece_like()
    bad = ids_of(tokenizer, "<0xFF>") * (4 * MAX_WITHHELD_TOKENS)
    got = pieces(tokenizer, bad)
    assert "".join(got) == "\ufffd" * len(bad)


def test_leading_space_is_kept_only_after_a_prompt() -> None:
    tokenizer = sentencepiece_like()
    hello, world = ids_of(tokenizer, "▁Hello", "▁world")
    assert "".join(pieces(tokenizer, [world], before=[hello])) == " world"
    assert "".join(pieces(tokenizer, [hello, world])) == "Hello world"


def test_byte_fallback_characters_are_complete_between_words() -> None:
    tokenizer = sentencepiece_like()
    ids = [
        *ids_of(tokenizer, "▁Hello"),
        *fallback(tokenizer, "世界"),
        *ids_of(tokenizer, "▁world", "!"),
    ]
    assert pieces(tokenizer, ids) == ["Hello", "", "", "世", "", "", "界", " world", "!", ""]


def test_special_tokens_are_hidden() -> None:
    tokenizer = sentencepiece_like()
    ids = ids_of(tokenizer, "▁Hello", "</s>", "▁world")
    assert "".join(pieces(tokenizer, ids)) == "Hello world"


def test_character_split_by_the_prompt_end_is_shown_whole() -> None:
    euro = encode_bytes("€")
    assert "".join(pieces(byte_level(), euro[2:], before=[*encode_bytes("ab"), *euro[:2]])) == "€"


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_decode_as_if_decoded_at_once(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("aé€😀 \n") for _ in range(40))
    ids = encode_bytes(text)
    for _ in range(seed % 5):
        ids.insert(draw.randrange(len(ids)), BYTES_FROM + draw.randrange(256))
    assert "".join(pieces(byte_level(), ids)) == byte_level().decode(ids)
