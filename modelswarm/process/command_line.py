"""Command-line helpers shared by server, gateway and operator.

Reads flags into one settings object and splits HOST:PORT. An error that a user can correct becomes one sentence on
stderr. Its exit code is 2, 3 if a server does not fit into its memory limit, or 4 if its device is not usable. Used by
the `settings` and `app` of each process, and by the local runtime. Knows no process.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from modelswarm.errors import DeviceError, MemoryLimitError, ModelSwarmError, UserError

MAX_PORT = 65535
MAX_THREADS = 1024
_DEVICE = re.compile(r"auto|cpu|accelerator|(cuda|xpu)(:\d{1,3})?", re.ASCII)
USER_ERROR_EXIT_CODE = UserError.exit_code
"""Wrong flags or model: the same command would fail again."""
LASTING_EXIT_CODES = (USER_ERROR_EXIT_CODE, MemoryLimitError.exit_code, DeviceError.exit_code)
"""Exit codes after one sentence on stderr; the same command would fail again."""

Settings = TypeVar("Settings")


class Seconds(click.FloatRange):
    """A finite number of seconds in a range. click's own range accepts nan, and without a maximum inf."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = float(super().convert(value, param, ctx))
        if not math.isfinite(seconds):
            self.fail(f"{value} is not in the range {self._describe_range()}.", param, ctx)
        return seconds


def threads(text: str) -> int | None:
    """Return a number of CPU threads; None for `auto`. Used as the type of a flag."""
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= MAX_THREADS:
        raise click.BadParameter(f"{text!r} is neither auto nor a number from 1 to {MAX_THREADS}.")
    return int(text)


def device(text: str) -> str:
    """Return the name of a device as a server takes it. Used as the type of a flag."""
    if not _DEVICE.fullmatch(text):
        raise click.BadParameter(
            f"{text!r} is not a device; allowed: auto, cpu, accelerator, a kind such as cuda, or cuda:0."
        )
    return text


def read_flags(command: click.Command, kind: type[Settings], arguments: Sequence[str]) -> Settings:
    """Return the settings object, a `kind`, that the command's callback makes of the flags.

    Raises UserError or click's own errors; both are one sentence. `--help` prints and exits.
    """
    settings: Settings | int = command.main(list(arguments), standalone_mode=False)
    if not isinstance(settings, kind):
        raise SystemExit(settings)
    return settings


def split_target(field: str, target: str, example: str = "127.0.0.1:8000") -> tuple[str, int]:
    """Split "127.0.0.1:8000" into ("127.0.0.1", 8000); an IPv6 host is written in brackets.

    Errors name `field` and give `example` as an allowed value.
    """
    host, _, port = target.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > MAX_PORT:
        raise UserError(field, f"{target!r} is not HOST:PORT, like {example}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_target(host: str, port: int) -> str:
    """Return "127.0.0.1:8000" from its parts, the inverse of `split_target`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def run_with_exit_code(
    program: str, job: Callable[[], int], name_flag: Callable[[str], str] = str
) -> int:
    """Return the job's exit code, or that of an expected error after printing it.

    The error is one sentence, the last line on stderr: Kubernetes shows that line. `name_flag` maps the field of a
    UserError to the flag's name. Unexpected exceptions are not caught.
    """
    try:
        return job()
    except UserError as error:
        return _report(program, f"{name_flag(error.field)}: {error.message}")
    except ModelSwarmError as error:
        return _report(program, str(error), error.exit_code)
    except click.ClickException as error:
        return _report(program, error.format_message())
    except click.Abort:
        return _report(program, "interrupted")


def _report(program: str, sentence: str, exit_code: int = USER_ERROR_EXIT_CODE) -> int:
    sys.stderr.write(f"{program}: {' '.join(sentence.split())}\n")  # library errors have line ends
    return exit_code
