"""Tables that fit the terminal: columns are dropped by rank, and no cell is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typing_extensions import override

from modelswarm.cli.terminal.names import common_beginning, count_of, find_name
from modelswarm.cli.terminal.tables import Cell, Column, FittedTable, ShownColumn, can_redraw

NAMES = ("counting-s0-r0", "counting-s0-r1")
COLUMNS = (
    Column("server"),
    Column("state"),
    Column("pages", rank=2, short_title="free", right=True),
    Column("address", rank=1),
)
TABLE = FittedTable(
    "Servers",
    COLUMNS,
    [
        (
            Cell(name, short=name[-5:]),
            "suspected",
            Cell("2276 of 2276", short="2276"),
            "127.0.0.1:41234",
        )
        for name in NAMES
    ],
)
FULL_WIDTH = 14 + 9 + 12 + 15 + 3 * 2


def draw(table: FittedTable, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, highlight=False, markup=False)
    out.print(table)
    assert isinstance(out.file, io.StringIO)
    return out.file.getvalue().splitlines()


def shown(width: int) -> list[tuple[str, bool]]:
    fitted = TABLE.fit(width)
    assert fitted is not None
    return [(COLUMNS[each.index].title, each.is_short) for each in fitted]


def test_wide_terminal_shows_every_column_in_full() -> None:
    assert TABLE.fit(FULL_WIDTH) == [ShownColumn(index, False) for index in range(4)]


def test_droppable_cells_are_shortened_before_a_drop() -> None:
    assert shown(FULL_WIDTH - 1) == [
        ("server", False),
        ("state", False),
        ("pages", True),
        ("address", False),
    ]


def test_lowest_rank_is_dropped_and_the_room_is_used() -> None:
    assert shown(45) == [("server", False), ("state", False), ("pages", False)]


def test_essential_cells_are_shortened_last_with_a_note() -> None:
    assert shown(25) == [("server", False), ("state", False)]
    assert shown(24) == [("server", True), ("state", False)]


def test_too_narrow_terminal_gets_records() -> None:
    assert TABLE.fit(10) is None
    records = [
        line.rstrip() for line in draw(FittedTable("T", COLUMNS[1:], [("a" * 50, "1", "x")]), 40)
    ]
    assert records[:3] == ["T", "a" * 40, "a" * 10]
    assert [line.split() for line in records[3:5]] == [["pages", "1"], ["address", "x"]]


@pytest.mark.parametrize("width", range(14, 80))
def test_no_width_cuts_a_name_or_a_number(width: int) -> None:
    lines = draw(TABLE, width)
    text = "\n".join(lines)
    assert all(len(line) <= width for line in lines)
    assert "…" not in text
    for name in NAMES:
        assert name in text or name[-5:] in text
    assert "2276" in text or "pages" not in text


def test_wide_characters_count_as_two_columns() -> None:
    table = FittedTable("T", (Column("a"), Column("b")), [("日本", "x"), ("ab", "y")])
    assert draw(table, 20)[2:4] == ["日本  x", "ab    y"]


@pytest.mark.parametrize(
    ("names", "beginning"),
    [
        (("counting-s0-r0", "counting-s1-r0"), "counting-"),
        (("a-s0-r0", "a-s0-r1", "a-s0-r10"), "a-s0-"),
        (("a-b", "c-b"), ""),
        (("one",), ""),
        ((), ""),
        (("a-b", "a-b"), ""),
        (("a-", "a-b"), "a-"),
    ],
)
def test_common_beginning_ends_at_a_hyphen(names: tuple[str, ...], beginning: str) -> None:
    assert common_beginning(names) == beginning


def test_short_name_finds_the_only_server_that_ends_so() -> None:
    names = ("x-s0-r0", "x-s0-r1", "y-s0-r1")
    assert find_name("s0-r0", names) == "x-s0-r0"
    assert find_name("s0-r1", names) == "s0-r1", "two end so"
    assert find_name("y-s0-r1", names) == "y-s0-r1"


def test_counts_have_the_right_plural() -> None:
    assert [count_of(number, "server") for number in (0, 1, 2)] == [
        "0 servers",
        "1 server",
        "2 servers",
    ]


def test_only_a_terminal_with_a_cursor_is_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dumb terminal would show nothing, and a file would get movements of a cursor."""

    class Screen(io.StringIO):
        @override
        def isatty(self) -> bool:
            return True

    for term, file, is_live in (
        ("xterm", Screen(), True),
        ("dumb", Screen(), False),
        ("xterm", io.StringIO(), False),
    ):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("FORCE_COLOR", "1")
        assert can_redraw(Console(file=file)) is is_live
