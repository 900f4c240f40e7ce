"""Stop strings are found across chunks, and text that may begin one is withheld."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import SupportsIndex

import pytest
from typing_extensions import override

from modelswarm_gateway.generation.output.stop_strings import StopMatcher


def feed_chunks(stops: Sequence[str], pieces: Sequence[str]) -> tuple[list[str], bool]:
    matcher, shown = StopMatcher(stops), []
    for piece in pieces:
        found = matcher.feed(piece)
        shown.append(found.text)
        if found.matched:
            return shown, True
    return [*shown, matcher.flush()], False


@pytest.mark.parametrize(
    ("stops", "pieces", "shown", "matched"),
    [
        ([], ["a", "b"], ["a", "b", ""], False),
        (["STOP"], ["abc", "STOP", "x"], ["abc", ""], True),
        (["STOP"], ["ab S", "TO", "P and more"], ["ab ", "", ""], True),
        (["STOP"], ["ab S", "TO", "X"], ["ab ", "", "STOX", ""], False),
        (["STOP"], ["SSTOP"], ["S"], True),
        (["aab"], ["aa", "ab"], ["", "a"], True),
        (["\n\n"], ["a\n", "b\n", "\n"], ["a", "\nb", ""], True),
        (["bc", "abcd"], ["abcd"], ["a"], True),
        (["ab", "b"], ["ab"], [""], True),
        (["late", "x"], ["la x te"], ["la "], True),
        (["é"], ["caf", "é!"], ["caf", ""], True),
        (["end"], ["the e", "n"], ["the ", "", "en"], False),
    ],
)
def test_stop_string_is_cut_off(
    stops: list[str], pieces: list[str], shown: list[str], matched: bool
) -> None:
    assert feed_chunks(stops, pieces) == (shown, matched)


@pytest.mark.parametrize("pieces", [["ab STOP more"], ["ab S", "TO", "P and"], list("ab STOPx")])
def test_kept_stop_string_ends_the_text(pieces: list[str]) -> None:
    matcher = StopMatcher(["late", "STOP"], keeps_match=True)
    shown = ""
    for piece in pieces:
        found = matcher.feed(piece)
        shown += found.text
        if found.matched:
            break
    assert (shown, matcher.match) == ("ab STOP", "STOP")


@pytest.mark.parametrize(
    ("pieces", "shown", "match"),
    [
        (["a STOP", "b", "c"], "a STOPbc", None),
        (["STOPSTOP", "b", "STOP c"], "STOPSTOPb", "STOP"),
        (["x", "STO", "P"], "x", "STOP"),  # it ends behind the first two
        (["a STOPST", "O", "P c"], "a STOP", "STOP"),
    ],
)
def test_no_match_ends_in_the_first_pieces(
    pieces: list[str], shown: str, match: str | None
) -> None:
    matcher = StopMatcher(["never", "STOP"], min_pieces=2)
    text = "".join(matcher.feed(piece).text for piece in pieces) + matcher.flush()
    assert (text, matcher.match) == (shown, match)


@pytest.mark.parametrize("seed", range(50))
def test_stop_matching_is_independent_of_the_chunks(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(60))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(3, 7))) for _ in range(3)]
    cuts = sorted(rng.sample(range(len(text)), 12))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    by_piece, by_character = feed_chunks(stops, pieces), feed_chunks(stops, list(text))
    assert ("".join(by_piece[0]), by_piece[1]) == ("".join(by_character[0]), by_character[1])
    if not by_character[1]:
        assert "".join(by_character[0]) == text


@pytest.mark.parametrize("seed", range(50))
def test_match_is_the_first_that_a_search_from_the_start_finds(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice("ab") for _ in range(40))
    stops = ["".join(rng.choice("ab") for _ in range(rng.randint(2, 6))) for _ in range(3)]
    ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    shown, matched = feed_chunks(stops, list(text))
    assert ("".join(shown), matched) == (text[: min(ends)[1]] if ends else text, bool(ends))


class CountedText(str):
    """A stop string that counts reads of its characters."""

    reads = 0

    @override
    def __getitem__(self, place: SupportsIndex | slice) -> str:
        CountedText.reads += 1
        return super().__getitem__(place)


def test_long_stops_with_common_beginnings_cost_the_same_a_token() -> None:
    """The text matches all of one stop but its end, and nothing of fifteen others: a few reads per character."""
    stops = [CountedText("a" * 999 + "z")]
    stops += [CountedText(chr(ord("b") + number) + "a" * 999) for number in range(15)]
    matcher = StopMatcher(stops)
    CountedText.reads = 0
    tokens = 2000
    for _ in range(tokens):
        assert not matcher.feed("a" * 4).matched
    assert CountedText.reads <= 3 * len(stops) * 4 * tokens
