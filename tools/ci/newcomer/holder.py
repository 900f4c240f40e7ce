"""The first process of a container: makes its mounts and its loopback, says `ready`, and waits until it is killed.

Started by `container.py` through `unshare`, with the root file system as the argument.
"""

from __future__ import annotations

import fcntl
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

SIOCSIFFLAGS = 0x8914  # sets an interface's flags
IFF_UP = 1


def main(root: Path) -> None:
    start_loopback()
    for kind, place, options in (
        ("proc", "proc", "nosuid"),
        ("devpts", "dev/pts", "newinstance,ptmxmode=0666,mode=620"),
        ("tmpfs", "dev/shm", "mode=1777"),
        ("tmpfs", "run", "mode=755"),
    ):
        (root / place).mkdir(parents=True, exist_ok=True)
        subprocess.run(("mount", "-t", kind, "-o", options, kind, root / place), check=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel removes ended orphans
    print("ready", flush=True)
    while True:
        signal.pause()


def start_loopback() -> None:
    """Switch `lo` on; a new network namespace has it switched off. On a shared network it is on already."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as channel:
        request = struct.pack("16sH14x", b"lo", IFF_UP)
        fcntl.ioctl(channel, SIOCSIFFLAGS, request)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
