"""Options by which `generate` runs a model without a swarm: it starts a private one, which ends with the command."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import click

from modelswarm.cli.options.target import HttpTarget
from modelswarm.errors import UserError
from modelswarm.process.command_line import device as device_type

_NEEDED = ("torch", "fastapi")  # packages of servers and gateways
_OPTIONS = (
    click.option(
        "--checkpoint-path",
        metavar="PATH",
        help="Run this model in a private swarm, which ends with the command: a folder, or owner/name of a hub.",
    ),
    click.option(
        "--tokenizer-name",
        metavar="NAME",
        help="With --checkpoint-path: tokenizer in another folder, or owner/name of a hub.",
    ),
    click.option(
        "--spans",
        type=click.IntRange(1, 256),
        metavar="N",
        help="With --checkpoint-path: servers that the model is split over. Default: 1.",
    ),
    click.option(
        "--device",
        type=device_type,
        help="With --checkpoint-path: device of the servers, auto, cpu, cuda, cuda:0. Default: cpu.",
    ),
)


def checkpoint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of this module to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The values of the options; UserError for one that has no effect."""

    checkpoint_path: str | None
    tokenizer_name: str | None
    spans: int | None
    device: str | None

    def check_beside(self, others: dict[str, object]) -> None:
        """Refuse options without an effect. `others`: options that mean a running swarm, with their values."""
        if self.checkpoint_path is not None:
            for option, value in others.items():
                if value is not None:
                    raise UserError(
                        option, "means a running swarm; allowed: it or --checkpoint-path"
                    )
            return
        mine = {
            "--tokenizer-name": self.tokenizer_name,
            "--spans": self.spans,
            "--device": self.device,
        }
        for option, value in mine.items():
            if value is not None:
                raise UserError(option, "has an effect only with --checkpoint-path")

    @contextmanager
    def running(self) -> Iterator[HttpTarget]:
        """Yield the gateway of a private swarm, which is stopped at the end in any case. Main thread only."""
        for package in _NEEDED:
            if find_spec(package) is None:
                sentence = f"needs {package}; pip install 'modelswarm[serving,gateway]'"
                raise UserError("--checkpoint-path", sentence)

        from modelswarm.cli.terminal.signals import run_until_signal
        from modelswarm.local.private_swarm import private_swarm

        assert self.checkpoint_path is not None
        swarm = private_swarm(
            self.checkpoint_path, self.tokenizer_name, self.spans or 1, self.device or "cpu"
        )
        if sys.stderr.isatty():
            click.echo(f"starting {swarm.plan.source} ...", err=True)
        with run_until_signal(swarm.stop):
            swarm.start()
            yield HttpTarget(f"http://{swarm.http}")
