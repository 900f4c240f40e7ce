"""The subcommands with their arguments and options, one module each.

Their imports are light: click and small modules. The work is imported by a command when it runs, so that `--help` and
completion answer at once. `tests/unit/cli/test_imports.py` has the list of modules that are too heavy.
"""

from __future__ import annotations

import click

from modelswarm.cli.commands.batch import batch
from modelswarm.cli.commands.chat import chat
from modelswarm.cli.commands.completion import completion
from modelswarm.cli.commands.convert import convert
from modelswarm.cli.commands.demo import demo
from modelswarm.cli.commands.drain import drain
from modelswarm.cli.commands.generate import generate
from modelswarm.cli.commands.logs import logs
from modelswarm.cli.commands.plan import plan
from modelswarm.cli.commands.routes import routes
from modelswarm.cli.commands.sessions import sessions
from modelswarm.cli.commands.status import status
from modelswarm.cli.commands.ui import ui
from modelswarm.cli.commands.up import up

ALL = (
    up, chat, generate, batch, status, sessions, logs, routes, drain, plan, convert, demo, ui,
    completion,
)  # fmt: skip


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="modelswarm")
def commands() -> None:
    """Serve a language model split over several processes, and keep every stream alive when one dies.

    \b
    First steps:
      modelswarm demo                        see it: four servers, one chat, one kill
      modelswarm up examples/counting.yaml   start a swarm on this machine
      modelswarm chat                        chat with it, from another terminal
      modelswarm ui                          see it in a browser
      modelswarm status                      what it does, or what its start waits for
      modelswarm logs                        what its processes write
    """


for command in ALL:
    commands.add_command(command)
