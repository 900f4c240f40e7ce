"""The console and the table style of all commands. Output that is not a terminal stays plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

FILE_WIDTH = 120  # columns, for output that is not a terminal


def make_console(stderr: bool = False) -> Console:
    """Return a console without colours and cursor movements, and with a fixed width unless it is a terminal."""
    out = Console(stderr=stderr, highlight=False, markup=False, soft_wrap=True)
    if not out.is_terminal:
        out.width = FILE_WIDTH
    return out


def make_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table in the commands' common style."""
    drawn = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE)
    for column in columns:
        drawn.add_column(column, no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn
