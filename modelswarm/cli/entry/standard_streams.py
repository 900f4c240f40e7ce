"""Standard streams and arguments in a state that every command can rely on. Used by the entry point.

Bytes that are not UTF-8 reach Python as surrogates, which neither JSON nor gRPC can carry. They are refused here.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from modelswarm.errors import UserError


def prepare_streams() -> None:
    """Open closed standard streams, refuse undecodable input, and escape what the output's encoding lacks."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - open until the process ends
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdin, io.TextIOWrapper):
        # A file or a pipe is UTF-8 in every locale; a terminal sends what it shows.
        encoding = None if sys.stdin.isatty() else "utf-8"
        sys.stdin.reconfigure(encoding=encoding, errors="strict")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def require_utf8(arguments: Sequence[str]) -> None:
    """Raise UserError for an argument that is not UTF-8, unless it is the name of a file."""
    for argument in arguments:
        if not _is_utf8(argument) and not os.path.exists(argument):
            shown = os.fsencode(argument).decode(errors="backslashreplace")
            raise UserError(f"argument '{shown}'", "not UTF-8; allowed: text in UTF-8")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
