"""Writes streamed text with lines broken at spaces, and remarks on their own lines. Used by `demo`."""

from __future__ import annotations

from typing import IO

from modelswarm.cli.terminal.printing import replace_control_characters

INDENT = "   "


class WrappingWriter:
    def __init__(self, file: IO[str], width: int = 96) -> None:
        self._file, self._width = file, width
        self._column = 0

    def write(self, text: str) -> None:
        for character in text:
            if character == "\n" or (character == " " and self._column >= self._width):
                self._break_line()
            else:
                self._write_character(character)
        self._file.flush()

    def write_remark(self, text: str) -> None:
        """Write a remark on its own line; the text continues below it."""
        self.end_line()
        self._file.write(f"\n{text}\n\n")
        self._file.flush()

    def end_line(self) -> None:
        """End the current line, unless it is empty."""
        if self._column:
            self._break_line()
        self._file.flush()

    def _write_character(self, character: str) -> None:
        character = replace_control_characters(character)
        self._file.write(character if self._column else INDENT + character)
        self._column += 1

    def _break_line(self) -> None:
        self._file.write("\n")
        self._column = 0
