"""A small program in place of a server, for tests of the supervisor: real process, real pipe, real signals.

It writes its pid into FILE when it is ready, and exits when the other end of the pipe is closed.

stand_in_program.py --parent-fd FD --ready FILE [--exit-after SECONDS] [--code N] [--deaf]
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent-fd", type=int, required=True)
    parser.add_argument("--ready", type=Path, required=True)
    parser.add_argument("--exit-after", type=float, default=300.0)
    parser.add_argument("--code", type=int, default=0)
    parser.add_argument("--deaf", action="store_true")
    options = parser.parse_args()
    if options.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    options.ready.write_text(str(os.getpid()))
    readable, _, _ = select.select([options.parent_fd], [], [], options.exit_after)
    sys.exit(0 if readable else options.code)


if __name__ == "__main__":
    main()
