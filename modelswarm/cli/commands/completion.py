"""`modelswarm completion SHELL`: prints the script by which a shell completes commands, options, servers and swarms."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  eval "$(modelswarm completion bash)"    in ~/.bashrc
    zsh:   eval "$(modelswarm completion zsh)"     in ~/.zshrc, after compinit
    fish:  modelswarm completion fish | source     in ~/.config/fish/config.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    program = context.find_root()
    click.echo(kind(program.command, {}, "modelswarm", "_MODELSWARM_COMPLETE").source())
