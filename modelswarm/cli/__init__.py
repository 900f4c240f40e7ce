"""The `modelswarm` command: its entry point.

This package imports nothing heavy, so that Ctrl-C during the imports ends as quietly as later. `commands` declares the
subcommands, the modules beside it do their work, `entry` turns errors into one sentence and an exit code.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Sequence

# Net number of new objects that starts a garbage collection. Imports make about 200,000 that stay: with Python's 700,
# collections take a tenth of a short command.
GC_THRESHOLD = 100_000


def main() -> None:
    """Entry point of the console script. After the command, Ctrl-C ends the process without a message."""
    gc.set_threshold(GC_THRESHOLD)
    code = run(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; see `entry.failures` for the codes. SystemExit passes."""
    try:
        from modelswarm.cli.commands import commands
        from modelswarm.cli.entry.standard_streams import prepare_streams, require_utf8

        prepare_streams()
        require_utf8(arguments)
        code = commands.main(list(arguments), prog_name="modelswarm", standalone_mode=False)
    except SystemExit:
        raise
    except BaseException as error:
        from modelswarm.cli.entry.failures import report_failure

        return report_failure(error)
    return code if isinstance(code, int) else 0
