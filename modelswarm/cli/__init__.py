"""The `modelswarm` command: one module per subcommand; errors become one sentence and an exit code here.

Exit codes: 0 done, 1 failed, 2 wrong input, 130 interrupted. Does not know what the subcommands do.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from modelswarm.cli.chat import chat
from modelswarm.cli.demo.demo import demo
from modelswarm.cli.drain import drain
from modelswarm.cli.generate import generate
from modelswarm.cli.plan import plan
from modelswarm.cli.routes import routes
from modelswarm.cli.status import status
from modelswarm.cli.up import up
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.local.supervisor import StartError

INTERRUPTED = 130
FAILED = 1
USER_ERROR = 2


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="modelswarm")
def commands() -> None:
    """Serve a language model split over several processes, and keep every stream alive when one dies.

    \b
    First steps:
      modelswarm demo                        see it: four servers, one chat, one kill
      modelswarm up examples/counting.yaml   start a swarm on this machine
      modelswarm chat                        chat with it, from another terminal
    """


for command in (up, chat, generate, status, routes, drain, plan, demo):
    commands.add_command(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the console script."""
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code. Expected errors are printed without a traceback."""
    try:
        code = commands.main(arguments, prog_name="modelswarm", standalone_mode=False)
    except click.Abort:
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except ModelSwarmError as error:
        click.echo(f"Error: {error}", err=True)
        return USER_ERROR if _is_user_error(error) else FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it (`| head`); Python would raise again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code if isinstance(code, int) else 0


def _is_user_error(error: ModelSwarmError) -> bool:
    return isinstance(error, UserError) or (isinstance(error, StartError) and error.is_user_error)
