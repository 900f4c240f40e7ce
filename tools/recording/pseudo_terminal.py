"""A program on a pseudo-terminal: what is typed to it, and all that it shows, with times.

Used by the recorded session and by the newcomer's walk. Knows neither the programs nor the screens.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[()][A-Z0-9]|[=>78])")
SECONDS_BETWEEN_LOOKS = 0.02
SECONDS_TO_END = 30.0  # after SIGHUP
CTRL_C, CTRL_D = "\x03", "\x04"


class TerminalError(RuntimeError):
    """A program did not show what it had to show, or did not end."""


class PseudoTerminal:
    """Runs `command`. Use it as a context manager: at its end the program is gone."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        rows: int = 30,
        columns: int = 100,
        folder: Path | None = None,
        listener: Callable[[bytes], None] | None = None,
    ) -> None:
        """`listener` is called by another thread with every piece of output."""
        self._command, self._environment, self._folder = command, environment, folder
        self._size = struct.pack("HHHH", rows, columns, 0, 0)
        self._listener = listener
        self._output = bytearray()

    def __enter__(self) -> Self:
        self._screen, keyboard = pty.openpty()
        fcntl.ioctl(keyboard, termios.TIOCSWINSZ, self._size)
        self._process = subprocess.Popen(
            self._command,
            stdin=keyboard,
            stdout=keyboard,
            stderr=keyboard,
            env=dict(self._environment),
            cwd=self._folder,
            start_new_session=True,
            preexec_fn=_take_terminal,  # so that Ctrl-C reaches the program
        )
        os.close(keyboard)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGHUP)  # an interactive shell ignores SIGTERM
            try:
                self._process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join(SECONDS_TO_END)
        os.close(self._screen)

    def _read(self) -> None:
        while True:
            try:
                piece = os.read(self._screen, 65536)
            except OSError:  # the last process that had the terminal is gone
                return
            self._output += piece
            if self._listener is not None:
                self._listener(piece)

    @property
    def text(self) -> str:
        """All that was shown, without colours, cursor movements and carriage returns."""
        shown = bytes(self._output).decode(errors="replace")
        return ESCAPES.sub("", shown).replace("\r", "")

    def type(self, keys: str, seconds_per_key: float = 0.0) -> None:
        for key in keys if seconds_per_key else (keys,):
            os.write(self._screen, key.encode())
            time.sleep(seconds_per_key)

    def wait_for(self, pattern: str, seconds: float, after: int = 0) -> re.Match[str]:
        """Wait until the text behind the first `after` characters has the pattern; return the match."""
        deadline = time.monotonic() + seconds
        while True:
            has_ended = not self._reader.is_alive()
            shown = self.text
            if found := re.compile(pattern, re.MULTILINE).search(shown, after):
                return found
            if has_ended or time.monotonic() > deadline:
                reason = "the program ended" if has_ended else f"{seconds:.0f} s passed"
                raise TerminalError(
                    f"{reason} without {pattern!r}; shown:\n{shown[after:][-3000:]}"
                )
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def wait_end(self, seconds: float) -> int:
        """Wait for the end of the program; return its exit code."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as late:
            raise TerminalError(
                f"no end within {seconds:.0f} s; shown:\n{self.text[-3000:]}"
            ) from late
        self._reader.join(SECONDS_TO_END)
        return code


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup` has it ignored
