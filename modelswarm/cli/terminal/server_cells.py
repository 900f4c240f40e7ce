"""Columns and cells about servers that several tables share: names and free pages. Draws nothing."""

from __future__ import annotations

from modelswarm.cli.terminal.tables import Cell, Column
from modelswarm.protocol.wire import api_pb2


def name_column(title: str, beginning: str) -> Column:
    """Return the column of names. Its short form leaves out `beginning`, which the table's title then says."""
    return Column(title, short_note=f"of {beginning}*" if beginning else "")


def name_cell(name: str, beginning: str) -> Cell:
    """Return the cell of a server's name; its short form has no `beginning`."""
    return Cell(name, short=name.removeprefix(beginning))


def pages_cell(server: api_pb2.Server) -> Cell:
    """Return `2276 of 2276`; in short, only the free pages."""
    return Cell(f"{server.free_pages} of {server.total_pages}", short=str(server.free_pages))
