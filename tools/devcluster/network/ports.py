"""Free ports of this machine, for programs that can't be told to choose one themselves."""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """All held open until all are known, so that no two are the same."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind((address, 0))
        return [int(each.getsockname()[1]) for each in sockets]
