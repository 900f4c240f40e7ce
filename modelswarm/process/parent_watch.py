"""Ends this process when its parent ends, by a pipe whose write end only the parent has.

Called by the `app` of server and gateway for `--parent-fd`. A pipe needs no polling and works on every POSIX system.
Does not know the parent.
"""

from __future__ import annotations

import os
import threading

from modelswarm.errors import UserError


def exit_with_parent(fd: int) -> None:
    """Exit with code 1 as soon as the other end of the pipe is closed. UserError if `fd` is not open."""
    try:
        os.fstat(fd)
    except OSError as error:
        raise UserError("--parent-fd", f"{fd} is not an open file descriptor") from error

    def watch() -> None:
        while os.read(fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
