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
def test_bytes_come_out_as_the_text_that_went_in(text: str) -> None:
    got = pieces(byte_level(), encode_bytes(text))
    assert "".join(got) == text


def test_a_character_is_shown_only_when_it_is_whole() -> None:
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


def test_half_a_character_at_the_end_shows_as_a_replacement_sign() -> None:
    assert pieces(byte_level(), encode_bytes("a€")[:-1]) == ["a", "", "", "\ufffd"]


def test_bytes_that_are_no_character_do_not_hold_up_what_follows() -> None:
    bad = [BYTES_FROM + 0xFF] * 5
    got = pieces(byte_level(), [*bad, *encode_bytes("ok")])
    assert "".join(got) == "\ufffd" * 5 + "ok"
    assert got[-2] == "k"


def test_endless_bad_bytes_stay_cheap_and_come_out() -> None:
    tokenizer = sentencepiece_like()
    bad = ids_of(tokenizer, "<0xFF>") * (4 * MAX_WITHHELD_TOKENS)
    got = pieces(tokenizer, bad)
    assert "".join(got) == "\ufffd" * len(bad)


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start() -> None:
    tokenizer = sentencepiece_like()
    hello, world = ids_of(tokenizer, "▁Hello", "▁world")
    assert "".join(pieces(tokenizer, [world], before=[hello])) == " world"
    assert "".join(pieces(tokenizer, [hello, world])) == "Hello world"


def test_byte_fallback_characters_come_whole_between_words() -> None:
    tokenizer = sentencepiece_like()
    ids = [
        *ids_of(tokenizer, "▁Hello"),
        *fallback(tokenizer, "世界"),
        *ids_of(tokenizer, "▁world", "!"),
    ]
    assert pieces(tokenizer, ids) == ["Hello", "", "", "世", "", "", "界", " world", "!", ""]


def test_special_tokens_show_nothing_and_break_nothing() -> None:
    tokenizer = sentencepiece_like()
    ids = ids_of(tokenizer, "▁Hello", "</s>", "▁world")
    assert "".join(pieces(tokenizer, ids)) == "Hello world"


def test_a_prompt_that_ends_inside_a_character_gives_the_whole_character() -> None:
    euro = encode_bytes("€")
    assert "".join(pieces(byte_level(), euro[2:], before=[*encode_bytes("ab"), *euro[:2]])) == "€"


@pytest.mark.parametrize("seed", range(20))
def test_any_bytes_give_what_decoding_them_at_once_gives(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice("aé€😀 \n") for _ in range(40))
    ids = encode_bytes(text)
    for _ in range(seed % 5):
        ids.insert(draw.randrange(len(ids)), BYTES_FROM + draw.randrange(256))
    assert "".join(pieces(byte_level(), ids)) == byte_level().decode(ids)
