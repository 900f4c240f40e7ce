"""Run files: small JSON files by which the processes of one machine find each other.

Servers, gateways and the operator write theirs when they are ready and remove them when they stop; gateways and
`LocalSwarm` read them. A file appears whole or not at all. A killed process leaves its file behind: the process that
killed it removes the file. Knows no folders and starts no process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelswarm.errors import UserError

RunFile = TypeVar("RunFile", bound=BaseModel)


class ServerFile(BaseModel):
    """The file of one ready server in the discovery folder. A gateway needs only `peer` and `target` to dial it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    peer: str = Field(min_length=1)
    target: str = Field(min_length=1)
    name: str = ""
    model: str = ""
    revision: str = ""
    first: int = 0
    last: int = 0
    n_blocks: int = 0
    metrics: str = ""
    pid: int = 0
    """Process id of the writer; `write_run_file` fills it in."""


class GatewayFile(BaseModel):
    """The file of one ready gateway: its addresses, each `host:port`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    http: str
    grpc: str
    metrics: str
    admin: str
    pid: int
    peer: str = ""


def write_run_file(path: Path, fields: Mapping[str, str | int]) -> None:
    """Write `fields` and the pid of this process, by which `remove_run_file` recognises the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps({**fields, "pid": os.getpid()}), encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk
        raise


def publish_addresses(path: Path, fields: Mapping[str, str | int]) -> None:
    """Write the file of `--run-file`. Raise UserError if it cannot be written."""
    try:
        write_run_file(path, fields)
    except OSError as error:
        raise UserError(
            "--run-file", f"{path} cannot be written: {error.strerror or error}"
        ) from error


def clear_run_file(path: Path) -> None:
    """Remove the file of a process that has ended, and what it had written when it was killed."""
    path.unlink(missing_ok=True)
    for partial in path.parent.glob(f".{path.name}.*.tmp"):
        partial.unlink(missing_ok=True)


def remove_run_file(path: Path) -> None:
    """Remove the file if this process wrote it: a successor may have written its own already."""
    try:
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink(missing_ok=True)
    except (OSError, ValueError, KeyError):
        return  # removed already, or written by another process


def read_server_file(folder: Path, name: str) -> ServerFile | None:
    """Return the file of server `name`, or None while the server is not ready."""
    return _read_run_file(folder / f"{name}.json", ServerFile)


def read_gateway_file(path: Path) -> GatewayFile | None:
    """Return the gateway's file, or None while the gateway is not ready."""
    return _read_run_file(path, GatewayFile)


def _read_run_file(path: Path, kind: type[RunFile]) -> RunFile | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return None  # left by another version; the running process will replace it
