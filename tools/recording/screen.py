"""Rows of a terminal's screen as runs of equally styled text, and the escape sequences that show them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import pyte
from pyte.screens import Char

COLOURS = ("black", "red", "green", "brown", "blue", "magenta", "cyan", "white")
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Style:
    """Colours are pyte's names, or six hexadecimal digits."""

    front: str = DEFAULT
    back: str = DEFAULT
    is_bold: bool = False
    is_reverse: bool = False
    is_underlined: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    column: int
    text: str
    style: Style = Style()


Row = tuple[Run, ...]


class Screen:
    """A terminal's screen, which escape sequences change."""

    def __init__(self, columns: int, rows: int) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._rows: list[Row] = [()] * rows

    def feed(self, piece: bytes) -> None:
        self._stream.feed(piece)

    def rows(self) -> list[Row]:
        """Return the rows, without plain spaces at their ends. Only those that changed are read again."""
        for number in self._screen.dirty:
            if number < len(self._rows):
                self._rows[number] = read_row(self._screen, number)
        self._screen.dirty.clear()
        return list(self._rows)


def read_row(screen: pyte.Screen, number: int) -> Row:
    cells = [screen.buffer[number][column] for column in range(screen.columns)]
    while cells and cells[-1].data == " " and style_of(cells[-1]) == Style():
        cells.pop()
    runs = []
    for style, group in groupby(enumerate(cells), lambda each: style_of(each[1])):
        members = list(group)
        runs.append(Run(members[0][0], "".join(cell.data for _, cell in members), style))
    return tuple(runs)


def style_of(cell: Char) -> Style:
    return Style(cell.fg, cell.bg, cell.bold, cell.reverse, cell.underscore)


def text_of(row: Row) -> str:
    return "".join(run.text for run in row)


def escape_codes(row: Row) -> str:
    """Return the text of a row with the escape sequences of its styles."""
    return "".join(f"\x1b[{style_codes(run.style)}m{run.text}" for run in row) + "\x1b[0m"


def style_codes(style: Style) -> str:
    codes = ["0"]
    codes += ["1"] * style.is_bold + ["4"] * style.is_underlined + ["7"] * style.is_reverse
    codes += colour_codes(style.front, 30) + colour_codes(style.back, 40)
    return ";".join(codes)


def colour_codes(name: str, base: int) -> list[str]:
    """Return the codes of a colour; `base` is 30 for text and 40 for the background."""
    if name == DEFAULT:
        return []
    plain = name.removeprefix("bright")
    if plain in COLOURS:
        return [str(base + COLOURS.index(plain) + (0 if plain == name else 60))]
    return [str(base + 8), "2", *(str(int(name[place : place + 2], 16)) for place in (0, 2, 4))]
