"""Writes streamed text with lines broken between words, and remarks on their own lines. Used by `chat` and `demo`.

A word is written once its end is known, so that no line breaks inside a word. Only a word longer than a line is split.
"""

from __future__ import annotations

import textwrap
from typing import IO

from rich.cells import cell_len

from modelswarm.cli.terminal.printing import replace_control_characters

_TAB = " " * 4


class WrappingWriter:
    def __init__(self, file: IO[str], width: int = 96, indent: str = "   ") -> None:
        """`width`: terminal columns of a line, after `indent`."""
        self._file, self._width, self._indent = file, max(1, width), indent
        self._column = 0
        self._spaces = ""  # between the written text and the word
        self._word = ""  # not written yet

    def write(self, text: str) -> None:
        for character in text.replace("\t", _TAB):
            if character == "\n":
                self._end_word()
                self._break_line()
            elif character == " ":
                self._end_word()
                self._spaces += " "
            else:
                self._add_character(replace_control_characters(character))
        self._file.flush()

    def write_remark(self, text: str) -> None:
        """Write a remark on its own line. The text continues below it, with the word that has not ended yet."""
        if self._column:
            self._break_line()
        lines = textwrap.fill(text, self._width, break_on_hyphens=False)
        self._file.write(f"\n{lines}\n\n")
        self._file.flush()

    def end_line(self) -> None:
        """Write what is left and end the current line, unless it is empty."""
        self._end_word()
        if self._column:
            self._break_line()
        self._file.flush()

    def _add_character(self, character: str) -> None:
        """Add a character to the word. Wide ones are words of their own: their scripts have no spaces."""
        cells = cell_len(character)
        if cells > 1 or cell_len(self._word) + cells > self._width:
            self._end_word()
        self._word += character
        if cells > 1:
            self._end_word()

    def _end_word(self) -> None:
        """Write the word, on a new line if it does not fit."""
        if not self._word:
            return
        size = cell_len(self._word)
        if self._column and self._column + len(self._spaces) + size > self._width:
            self._break_line()
        elif len(self._spaces) + size > self._width:
            self._spaces = ""  # a line begins with more spaces than it has room for
        start = "" if self._column else self._indent
        self._file.write(start + self._spaces + self._word)
        self._column += len(self._spaces) + size
        self._spaces = self._word = ""

    def _break_line(self) -> None:
        self._file.write("\n")
        self._column, self._spaces = 0, ""
