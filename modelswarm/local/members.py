"""The files by which local processes find each other: one per server that serves, one by the gateway.

Servers write `members/<name>.json` when they are ready and the gateway watches that folder; the gateway announces its
own addresses the same way. Used by `LocalSwarm`, which only reads them and removes those of the dead.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

Kind = TypeVar("Kind", bound=BaseModel)


class Member(BaseModel):
    """What a ready server says of itself."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    name: str
    peer: str
    target: str
    model: str
    first: int
    last: int
    n_blocks: int
    pid: int
    metrics: str = ""


class Announcement(BaseModel):
    """Where a gateway that is up can be reached, each `host:port`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    http: str
    grpc: str
    metrics: str
    pid: int
    peer: str = ""


def read_member(folder: Path, name: str) -> Member | None:
    """None while the server is not ready (files appear atomically)."""
    return _read(folder / f"{name}.json", Member)


def read_announcement(path: Path) -> Announcement | None:
    return _read(path, Announcement)


def _read(path: Path, kind: type[Kind]) -> Kind | None:
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        return None  # left by another version; the process that lives will replace it
