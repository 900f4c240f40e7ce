"""Free ports of this machine, for programs that can't choose one and say which.

Ports lie below the kernel's ephemeral range, so that no client connection takes one between its choice and its use.
A counter in a locked file gives each process other ports: a port comes again only after all others.
Used by the parts that start a server. Knows no server.
"""

from __future__ import annotations

import fcntl
import socket

from tools.devcluster.build.build import cache_folder

PORTS = range(20000, 30000)


def free_ports(count: int, address: str = "127.0.0.1") -> list[int]:
    """Return ports of that address that nothing listens on, each a different one."""
    file = cache_folder() / "next-port"
    file.parent.mkdir(parents=True, exist_ok=True)
    found: list[int] = []
    with file.open("a+") as counter:
        fcntl.flock(counter, fcntl.LOCK_EX)
        counter.seek(0)
        start = int(counter.read() or PORTS.start)
        for offset in range(len(PORTS)):
            port = PORTS[(start - PORTS.start + offset) % len(PORTS)]
            if _is_free(address, port):
                found.append(port)
            if len(found) == count:
                counter.truncate(0)
                counter.write(str(port + 1))
                return found
    raise RuntimeError(f"{address} has no {count} free ports from {PORTS.start} to {PORTS.stop}")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((address, port))
        except OSError:
            return False
    return True
