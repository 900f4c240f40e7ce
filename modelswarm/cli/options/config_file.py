"""The user's config file, `$XDG_CONFIG_HOME/modelswarm/config.toml`: the gateway that commands use by default.

All keys describe one gateway. They have no effect on a command that is given another one.
"""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from modelswarm.errors import UserError

KEYS = ("url", "admin", "model")


@dataclass(frozen=True, slots=True)
class Config:
    """The values of the file; None: not given."""

    path: Path
    url: str | None = None
    admin: str | None = None
    model: str | None = None


def config_path() -> Path:
    """Return the path of the file, which need not exist."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    # pathlib fails for a user without a home
    return Path(os.path.expanduser(base)) / "modelswarm" / "config.toml"


def read_config() -> Config:
    """Read the file; without one, nothing is given. UserError names the key that is wrong, and what is allowed."""
    path = config_path()
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Config(path)
    except OSError as error:
        raise UserError(str(path), f"{error.strerror}; allowed: a file of TOML") from None

    import tomllib  # a file is rare, and the module takes milliseconds

    try:
        values = tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise UserError(str(path), f"not UTF-8 (byte {error.start}); allowed: TOML") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(str(path), f"not TOML: {error}") from None
    return Config(path, **_check_values(path, values))


def _check_values(path: Path, values: dict[str, Any]) -> dict[str, str]:
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(KEYS)}"
            raise UserError(f"{path}: {key}", f"unknown key; {hint}")
        if not isinstance(value, str) or not value:
            raise UserError(f"{path}: {key}", f"{value!r} is not allowed; allowed: text in quotes")
    if values and "url" not in values:
        raise UserError(f"{path}: url", f"required beside {next(iter(values))}")
    return values
