"""`modelswarm-gateway`: flags in, a serving process, an exit code out.

0 after a graceful stop, 2 with one sentence when it cannot start; that sentence is the last line on stderr. Little is
imported before the flags are read and a signal can end the process: as the first process of a container it would
ignore one that it has no handler for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

import click

from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.local.lifeline import end_with_parent
from modelswarm_gateway.settings import Settings, parse

PROGRAM = "modelswarm-gateway"


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        return _serve(parse(sys.argv[1:] if arguments is None else arguments))
    except UserError as error:
        return _refuse(f"{error.field}: {error.message}")
    except ModelSwarmError as error:
        return _refuse(str(error))
    except click.ClickException as error:
        return _refuse(error.format_message())
    except click.Abort:
        return _refuse("interrupted")


def _refuse(sentence: str) -> int:
    sys.stderr.write(f"{PROGRAM}: {' '.join(sentence.split())}\n")  # libraries' errors have lines
    return 2


def _serve(settings: Settings) -> int:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end_early)  # until the process has its own way to stop
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {settings.name} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    if settings.parent_fd is not None:
        end_with_parent(settings.parent_fd)
    from modelswarm_gateway.process import Process

    asyncio.run(Process(settings).run())
    return 0


def _end_early(number: int, frame: object) -> None:
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
