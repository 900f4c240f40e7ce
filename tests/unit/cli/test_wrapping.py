"""Streamed text is wrapped between words, independent of its chunks."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len

from modelswarm.cli.terminal.wrapping import WrappingWriter

TEXT = "Count from 1 to 200: 36 37 38 and so on, until the end."


def write(pieces: list[str], width: int, indent: str = "") -> str:
    out = io.StringIO()
    writer = WrappingWriter(out, width, indent)
    for piece in pieces:
        writer.write(piece)
    writer.end_line()
    return out.getvalue()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
@pytest.mark.parametrize("width", [8, 20, 59])
def test_words_stay_whole_whatever_the_pieces(size: int, width: int) -> None:
    pieces = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    lines = write(pieces, width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert " ".join(lines) == TEXT


def test_line_ends_and_indentation_of_the_text_are_kept() -> None:
    assert write(["a:\n    b  c\n\nd"], 20) == "a:\n    b  c\n\nd\n"


def test_long_word_is_split_at_the_width() -> None:
    assert (
        write(["ab " + "x" * 25], 10) == "ab\n" + "x" * 10 + "\n" + "x" * 10 + "\n" + "x" * 5 + "\n"
    )


def test_wide_characters_break_anywhere_and_fit() -> None:
    lines = write(["日本語のテキスト" * 3], 11).splitlines()
    assert [cell_len(line) for line in lines] == [10, 10, 10, 10, 8]


def test_word_is_written_once_its_end_is_known() -> None:
    out = io.StringIO()
    writer = WrappingWriter(out, 20, "")
    writer.write("36 3")
    assert out.getvalue() == "36"
    writer.write("7 ")
    assert out.getvalue() == "36 37"


def test_remark_splits_no_word() -> None:
    out = io.StringIO()
    writer = WrappingWriter(out, 20, "")
    writer.write("36 3")
    writer.write_remark("(broken)")
    writer.write("7")
    writer.end_line()
    assert out.getvalue() == "36\n\n(broken)\n\n37\n"


def test_control_characters_are_replaced() -> None:
    assert write(["a\x1b[2Jb\tc"], 20) == "a·[2Jb    c\n"


def test_each_line_is_indented() -> None:
    assert write(["one two"], 4, "  ") == "  one\n  two\n"
