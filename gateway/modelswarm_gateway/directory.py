"""Who exists, by the members folder: every server that stands in it is dialled until it is linked.

The node asks it to `poll` and tells it how dials end. A file is one life of one server: a failing dial is repeated
while the same peer's file stands, with pauses that grow; a file that goes, or names another peer, ends that. Links
that are up are not its business. Knows no links, only a function that dials.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from modelswarm.protocol.identity import Address, PeerId

log = logging.getLogger(__name__)

FIRST_PAUSE = 0.1  # seconds between a failed dial and the next
LONGEST_PAUSE = 2.0
MOST_BYTES = 64 << 10  # of one file; larger ones are not a member's

_Signature = tuple[int, int, int]
"""(inode, size, time of change): a file with the same is not read again."""


class _MemberFile(BaseModel):
    """The part of a server's announcement that is needed to dial it."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    peer: str = Field(min_length=1)
    target: str = Field(min_length=1)


def _state(entry: os.DirEntry[str]) -> _Signature | None:
    """None: it went meanwhile, leads nowhere, or is no file; what else is there must still be seen."""
    try:
        state = entry.stat()
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):  # reading a pipe would wait for its writer
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


@dataclass(slots=True)
class _Known:
    """One member file that was read; `address` is None if it made no sense."""

    signature: _Signature
    address: Address | None


@dataclass(slots=True)
class _Dial:
    pause: float = FIRST_PAUSE
    due: float | None = 0.0  # None: under way, or linked


class Directory:
    def __init__(
        self, folder: Path, dial: Callable[[Address], None], clock: Callable[[], float]
    ) -> None:
        self._folder, self._dial, self._clock = folder, dial, clock
        self._files: dict[str, _Known] = {}
        self._dials: dict[PeerId, _Dial] = {}

    def poll(self) -> None:
        """Reads what changed in the folder and dials whoever is due."""
        self._read()
        present = {k.address.peer: k.address for k in self._files.values() if k.address}
        for peer in self._dials.keys() - present.keys():
            del self._dials[peer]
        now = self._clock()
        for peer, address in present.items():
            dial = self._dials.setdefault(peer, _Dial())
            if dial.due is not None and dial.due <= now:
                dial.due = None
                self._dial(address)

    def linked(self, peer: PeerId) -> None:
        if peer in self._dials:
            self._dials[peer] = _Dial(due=None)

    def unlinked(self, peer: PeerId) -> None:
        """The link broke or could not be made: dial again, later each time."""
        dial = self._dials.get(peer)
        if dial is not None and dial.due is None:
            dial.due = self._clock() + dial.pause
            dial.pause = min(2 * dial.pause, LONGEST_PAUSE)

    def _read(self) -> None:
        seen: dict[str, _Signature] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".json") and not entry.name.startswith("."):
                        state = _state(entry)
                        if state is not None:
                            seen[entry.name] = state
        except OSError as error:
            log.debug("members folder: %s", error)
            return
        for name in self._files.keys() - seen.keys():
            del self._files[name]
        for name, signature in seen.items():
            known = self._files.get(name)
            if known is None or known.signature != signature:
                self._files[name] = _Known(signature, self._address(name, signature[1]))

    def _address(self, name: str, size: int) -> Address | None:
        path = self._folder / name
        if size > MOST_BYTES:
            log.warning("%s: too large for a member file", path)
            return None
        try:
            member = _MemberFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("%s is no member file: %s", path, str(error).splitlines()[0])
            return None
        return Address(member.peer, member.target)
