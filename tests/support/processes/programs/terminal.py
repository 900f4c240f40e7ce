"""A command on a pseudo-terminal of a given width: its input, and all its output."""

from __future__ import annotations

import os
import pty
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fcntl import ioctl
from types import TracebackType
from typing import Self

from support.eventually import eventually

ROWS = 40
SECONDS = 300.0  # of a wait: an answer of 6,000 tokens took 58 s beside the rest of the full tier


@dataclass
class Terminal:
    """Runs `modelswarm` with `arguments`. Use it as a context manager: at its end the command is killed."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    width: int = 80
    _text: bytearray = field(default_factory=bytearray)

    def __enter__(self) -> Self:
        self._screen, keyboard = pty.openpty()
        ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, self.width, 0, 0))
        self.process = subprocess.Popen(
            (sys.executable, "-m", "modelswarm.cli", *self.arguments),
            stdin=keyboard,
            stdout=keyboard,
            stderr=keyboard,
            env={**os.environ, "TERM": "xterm", **self.environment},
            start_new_session=True,
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
        self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        os.close(self._screen)

    def _read(self) -> None:
        while True:
            try:
                self._text += os.read(self._screen, 65536)
            except OSError:  # the last process on the terminal has ended
                return

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    @property
    def text(self) -> str:
        """Return the whole output, with the program's line ends."""
        return bytes(self._text).decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, part: str, after: int = 0) -> int:
        """Wait until `part` is shown after the first `after` characters; return where it ends."""

        def find() -> int:
            return self.text.find(part, after) + 1

        shown_at = eventually(f"{part!r} is shown", find, SECONDS, lambda: self.text[after:])
        return shown_at - 1 + len(part)

    def wait_end(self) -> int:
        """Wait for the end of the command; return its exit code."""
        code = self.process.wait(SECONDS)
        self._reader.join(60)
        return code
