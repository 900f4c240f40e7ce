"""Options by which `generate` runs a model without a swarm: it starts a private one, which ends with the command."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import click

from modelswarm.cli.options.target import HttpTarget
from modelswarm.errors import UserError
from modelswarm.local.private_swarm import known_address, missing_package, private_swarm
from modelswarm.process.command_line import device as device_type

_SERVED_NAME = "private"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?")
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
        package = missing_package()
        if package is not None:
            sentence = f"needs {package}; pip install 'modelswarm[serving,gateway]'"
            raise UserError("--checkpoint-path", sentence)

        from modelswarm.cli.terminal.signals import run_until_signal

        assert self.checkpoint_path is not None
        model = {"source": model_address(self.checkpoint_path, "--checkpoint-path")}
        if self.tokenizer_name is not None:
            model["tokenizer"] = model_address(self.tokenizer_name, "--tokenizer-name")
        spec = {"spans": {"count": self.spans or 1}}
        swarm = private_swarm(_SERVED_NAME, model, spec, device=self.device or "cpu")
        if sys.stderr.isatty():
            click.echo(f"starting {swarm.plan.source} ...", err=True)
        with run_until_signal(swarm.stop):
            swarm.start()
            yield HttpTarget(f"http://{swarm.http}")


def model_address(given: str, option: str) -> str:
    """Return an address for a folder, for a name on the hub, or the address that is given."""
    address = known_address(given)
    if address is not None:
        return address
    allowed = "allowed: a folder in Hugging Face's format, or owner/name of a hub"
    if given and os.path.exists(os.path.expanduser(given)):
        raise UserError(option, f"{given} is a file; {allowed}")
    if not _HUB_NAME.fullmatch(given) or given.startswith("."):
        raise UserError(option, f"{given}: no such folder; {allowed}")
    return f"hf://{given}"
