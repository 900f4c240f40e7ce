"""Messages of a chat from lines of input: one line, or several.

A message goes on below a line that ends with a backslash, and from `\"\"\"` to the next `\"\"\"`.
"""

from __future__ import annotations

from modelswarm.cli.terminal.line_editing import LineReader

BLOCK = '"""'
PROMPT, MORE = "> ", ". "  # before the first line, and before further ones


def read_message(reader: LineReader) -> str | None:
    """Return the next message; None at the end of the input. Raise KeyboardInterrupt at Ctrl-C."""
    line = reader.read_line(PROMPT)
    if line is None:
        return None
    if line.lstrip().startswith(BLOCK):
        return _read_block(reader, line.lstrip().removeprefix(BLOCK))
    lines = []
    while line.endswith("\\"):
        lines.append(line.removesuffix("\\"))
        following = reader.read_line(MORE)
        if following is None:
            return "\n".join(lines)
        line = following
    return "\n".join([*lines, line])


def _read_block(reader: LineReader, line: str) -> str:
    """Return the text up to the mark. Blanks at its start do not make it a message with a command's name."""
    lines = []
    while not line.rstrip().endswith(BLOCK):
        lines.append(line)
        following = reader.read_line(MORE)
        if following is None:  # the end of the input ends the block
            return " " + "\n".join(lines)
        line = following
    lines.append(line.rstrip().removesuffix(BLOCK))
    return " " + "\n".join(lines).strip("\n")
