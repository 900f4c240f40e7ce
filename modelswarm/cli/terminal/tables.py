"""Tables that fit the terminal: columns are dropped by rank, and names, ids and numbers are never cut.

A table that does not fit takes these steps, in this order, until it does:

1. Columns that may be dropped show their cells' short forms.
2. They are dropped, rank 1 first. The others are then widened again where there is room.
3. Essential columns show their short forms, the rightmost first.
4. The rows are printed as records: a name, and a line per column.

Used by `status`, `routes`, `plan` and the live table of `up`. Output that is not a terminal is never shortened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

# Columns of output that is not a terminal: wide enough for every table, so that scripts see all of it.
FILE_WIDTH = 4096
# Rank of a column that is never dropped.
ESSENTIAL = 0
_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `rank` 1 is dropped first; an essential column never."""

    title: str
    rank: int = ESSENTIAL
    short_title: str = ""  # empty: the title
    right: bool = False  # numbers are aligned at the right
    short_note: str = ""  # added to the table's title where the short form is shown


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell's text, its short form if it has one, and its style."""

    text: str
    short: str = ""  # empty: the text
    style: str = ""

    def form(self, is_short: bool) -> str:
        return (self.short or self.text) if is_short else self.text


@dataclass(frozen=True, slots=True)
class ShownColumn:
    """A column of the layout: its index, and the form of its cells."""

    index: int
    is_short: bool


Row = Sequence[Cell | str]


def make_console(stderr: bool = False) -> Console:
    """Return a console. Output that is not a terminal has no colours, no cursor movements and no line breaks."""
    out = Console(stderr=stderr, highlight=False, markup=False)
    if not out.is_terminal:
        out.width, out.soft_wrap = FILE_WIDTH, True
    return out


def can_redraw(out: Console) -> bool:
    """Return whether lines can be drawn again: not on a dumb terminal, and in no file that FORCE_COLOR colours."""
    return out.is_terminal and out.file.isatty() and not out.is_dumb_terminal


class FittedTable:
    """A table that is laid out for the width at which it is drawn. The first column names the row."""

    def __init__(self, title: str, columns: Sequence[Column], rows: Iterable[Row]) -> None:
        self.title, self.columns = title, columns
        self.rows = [[_as_cell(cell) for cell in row] for row in rows]

    def fit(self, width: int) -> list[ShownColumn] | None:
        """Return the columns to show in `width` terminal columns; None if the essential ones do not fit."""
        droppable = sorted(
            (index for index, column in enumerate(self.columns) if column.rank != ESSENTIAL),
            key=lambda index: self.columns[index].rank,
        )
        short: set[int] = set()
        dropped: set[int] = set()
        for index in droppable:
            if self._width(dropped, short) > width and self._has_short_form(index):
                short.add(index)
        for index in droppable:
            if self._width(dropped, short) > width:
                dropped.add(index)
        for index in reversed(droppable):
            if self._width(dropped, short - {index}) <= width:
                short.discard(index)
        for index in reversed(range(len(self.columns))):
            if self._width(dropped, short) > width and self._has_short_form(index):
                short.add(index)
        if self._width(dropped, short) > width:
            return None
        kept = (index for index in range(len(self.columns)) if index not in dropped)
        return [ShownColumn(index, index in short) for index in kept]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self.fit(options.max_width)
        if shown is None:
            yield Text(self.title, style="bold")
            for row in self.rows:
                yield from self._record(row)
        else:
            notes = [self.columns[each.index].short_note for each in shown if each.is_short]
            yield Text(" ".join((self.title, *filter(None, notes))), style="bold")
            yield self._line(shown, [Cell(self._title(each), style="dim") for each in shown])
            for row in self.rows:
                yield self._line(shown, [row[each.index] for each in shown])
        yield Text("")

    def _line(self, shown: Sequence[ShownColumn], cells: Sequence[Cell]) -> Text:
        line = Text(no_wrap=True, overflow="ignore")
        for place, (each, cell) in enumerate(zip(shown, cells, strict=True)):
            text = cell.form(each.is_short)
            fill = " " * (self._column_width(each.index, each.is_short) - cell_len(text))
            if self.columns[each.index].right:
                line.append(fill)
            line.append(text, style=cell.style)
            if place < len(shown) - 1:
                line.append(_GAP if self.columns[each.index].right else fill + _GAP)
        return line

    def _record(self, row: Sequence[Cell]) -> Iterator[Text | Table]:
        """Yield the row's name, and below it the other columns with their titles. Long values continue below."""
        yield Text(row[0].text, style="bold", overflow="fold")
        lines = Table.grid(padding=(0, 1, 0, 0))
        lines.add_column(no_wrap=True, style="dim")
        lines.add_column(overflow="fold")
        for column, cell in zip(self.columns[1:], row[1:], strict=True):
            if cell.text:
                lines.add_row(f"  {column.title}", Text(cell.text, style=cell.style))
        yield lines

    def _title(self, shown: ShownColumn) -> str:
        column = self.columns[shown.index]
        return (column.short_title or column.title) if shown.is_short else column.title

    def _column_width(self, index: int, is_short: bool) -> int:
        texts = (row[index].form(is_short) for row in self.rows)
        return max(map(cell_len, (self._title(ShownColumn(index, is_short)), *texts)))

    def _has_short_form(self, index: int) -> bool:
        return self._column_width(index, True) < self._column_width(index, False)

    def _width(self, dropped: set[int], short: set[int]) -> int:
        kept = [index for index in range(len(self.columns)) if index not in dropped]
        widths = (self._column_width(index, index in short) for index in kept)
        return sum(widths) + len(_GAP) * (len(kept) - 1)


def _as_cell(cell: Cell | str) -> Cell:
    return Cell(cell) if isinstance(cell, str) else cell
