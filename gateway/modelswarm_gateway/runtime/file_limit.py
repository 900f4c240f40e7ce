"""The files that this process may open, and the connections that its ports take of them.

Each connection is an open file. Without a limit, clients with silent connections leave none for others and for links.
"""

from __future__ import annotations

import resource

# Most connections of a port at a time: above the requests and bodies that a gateway takes, each with 64 KiB.
MAX_CONNECTIONS = 8192
# Of the files of a process, for each of its four ports: a third is left for links and model processes.
PORT_SHARE = 6


def raise_file_limit() -> None:
    """Let this process open as many files as it may at most: many systems begin with 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            return  # macOS: its kernel allows less than that


def connection_limit() -> int:
    """Return the connections that one port of this process takes at a time."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft < 0 else max(1, min(MAX_CONNECTIONS, soft // PORT_SHARE))
