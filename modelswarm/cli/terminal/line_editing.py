"""Input lines of a terminal, with editing, and a history that is kept in the user's state folder. Used by `chat`.

Editing is GNU readline's, which Python's `input` uses once its module is imported: arrow keys, Ctrl-A, Ctrl-R.
Input that is not a terminal is read as it is.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

# Lines of the history file; the oldest are dropped.
MAX_HISTORY_LINES = 1000


class LineReader:
    """Reads lines; on a terminal with a prompt, editing and history."""

    def __init__(self, history: Path) -> None:
        self.is_interactive = sys.stdin.isatty()
        self._history: Path | None = None
        if self.is_interactive and sys.stdout.isatty():
            self._history = _load_history(history)

    def read_line(self, prompt: str) -> str | None:
        """Return the next line; None at the end of the input. Raise KeyboardInterrupt at Ctrl-C."""
        has_screen = sys.stdout.isatty()  # a file or a pipe gets the answers, and no prompts
        try:
            if self.is_interactive and not has_screen:
                click.echo(prompt, nl=False, err=True)
            line = input(prompt if self.is_interactive and has_screen else "")
        except (EOFError, KeyboardInterrupt) as error:
            if self.is_interactive:
                click.echo(err=not has_screen)  # the shell's prompt comes on a line of its own
            if isinstance(error, KeyboardInterrupt):
                raise
            return None
        if self._history is not None and line.strip():
            self._save_last_line(self._history)
        return line

    def _save_last_line(self, path: Path) -> None:
        """Append the last line at once: a killed chat keeps its history. If that fails, say so once and stop saving."""
        import readline

        try:
            readline.append_history_file(1, path)
        except OSError as error:
            _warn(path, error)
            self._history = None


def history_path(name: str) -> Path:
    """Return the history file `name` in `$XDG_STATE_HOME`, or in its default folder."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(os.path.expanduser(base)) / "modelswarm" / name


def _load_history(path: Path) -> Path | None:
    """Read the history file, made if needed for this user only. Return None if that fails: lines are then not saved."""
    import readline

    readline.set_history_length(MAX_HISTORY_LINES)
    if not path.is_absolute():  # the user has no home
        return None
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        path.chmod(0o600)
        readline.read_history_file(path)
    except OSError as error:
        _warn(path, error)
        return None
    return path


def _warn(path: Path, error: OSError) -> None:
    click.echo(f"note: the history is not saved in {path}: {error.strerror}", err=True)
