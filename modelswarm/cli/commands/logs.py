"""`modelswarm logs [NAME]`: shows where the logs of a swarm of this machine are, and their last lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from modelswarm.errors import UserError
from modelswarm.local.run_folder import list_starts

if TYPE_CHECKING:
    from modelswarm.local.log_files import LogFolder, LogLines

FOLLOW_SECONDS = 0.2


def complete_name(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Return the swarms of this machine that start or run and whose names begin so."""
    names = (start.name for start in list_starts())
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command()
@click.argument("name", required=False, shell_complete=complete_name)
@click.option("--process", metavar="NAME", help="Only this server, or `gateway`. Default: all.")
@click.option(
    "-f", "--follow", is_flag=True, help="Print new lines until the swarm ends, or Ctrl-C."
)
@click.option(
    "--lines",
    type=click.IntRange(0, 100_000),
    default=10,
    show_default=True,
    help="Last lines to print of each process.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def logs(name: str | None, process: str | None, follow: bool, lines: int, as_json: bool) -> None:
    """Show the logs of the swarm NAME of this machine, by default of the only one.

    The logs of a start that failed are kept until the next start of that name; those of other runs end with them.
    """
    from modelswarm.local.log_files import LogReader, find_logs

    folder = find_logs(name)
    reader = LogReader(folder.path, _full_name(folder, process))
    tails = reader.read_tails(lines)
    if as_json:
        for part in tails:
            _print_facts(folder, part)
    else:
        _print_tails(folder, tails)
    while follow and not folder.has_ended and folder.path.is_dir():
        time.sleep(FOLLOW_SECONDS)
        for part in reader.read_new():
            if as_json:
                _print_facts(folder, part)
            else:
                for line in part.lines:
                    click.echo(f"{part.log.process}: {line}")


def _full_name(folder: LogFolder, process: str | None) -> str | None:
    """Return the process that `process` names in full or in short; UserError if there is no such log."""
    from modelswarm.cli.terminal.names import find_name
    from modelswarm.local.log_files import latest_logs

    if process is None:
        return None
    names = [log.process for log in latest_logs(folder.path)]
    found = find_name(process, names)
    if found not in names:
        raise UserError("--process", f"{process!r} has no log; allowed: {', '.join(names)}")
    return found


def _print_tails(folder: LogFolder, tails: list[LogLines]) -> None:
    ended = "; its last start failed, or was killed" if folder.has_ended else ""
    click.echo(f"logs of {folder.swarm}: {folder.path}{ended}")
    for part in tails:
        click.echo(f"== {part.log.process} ({Path(part.log.path).name})")
        for line in part.lines:
            click.echo(line)


def _print_facts(folder: LogFolder, part: LogLines) -> None:
    from modelswarm.cli.json_output.printing import print_json

    print_json(
        {
            "swarm": folder.swarm,
            "process": part.log.process,
            "incarnation": part.log.incarnation,
            "path": str(part.log.path),
            "lines": list(part.lines),
        }
    )
