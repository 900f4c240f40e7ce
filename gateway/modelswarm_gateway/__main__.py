"""`modelswarm-gateway`: parses the flags, serves, and exits.

The exit code is 0 after a graceful stop, and 2 with one sentence, the last line on stderr, if the process cannot start.
Little is imported before the flags are read and a signal can end the process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from modelswarm.process.early_signals import exit_on_signals

if TYPE_CHECKING:
    from modelswarm_gateway.settings import Settings

PROGRAM = "modelswarm-gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the flags (default: those of the command line), serve, and return the exit code."""
    exit_on_signals()  # until the process has its own signal handlers
    from modelswarm.process.command_line import run_with_exit_code
    from modelswarm_gateway.settings import parse_settings

    return run_with_exit_code(
        PROGRAM, lambda: _serve(parse_settings(sys.argv[1:] if arguments is None else arguments))
    )


def _serve(settings: Settings) -> int:
    import asyncio
    import gc

    from modelswarm.process.logs import start_log
    from modelswarm.process.parent_watch import exit_with_parent

    start_log(settings.name)
    if settings.parent_fd is not None:
        exit_with_parent(settings.parent_fd)
    from modelswarm_gateway.app import GatewayApp
    from modelswarm_gateway.runtime.file_limit import raise_file_limit

    raise_file_limit()
    gc.collect()
    gc.freeze()  # modules are not garbage: scanning them again would delay every stream
    asyncio.run(GatewayApp(settings).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
