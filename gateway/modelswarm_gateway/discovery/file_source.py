"""Endpoint source on one machine: the discovery folder, with one small run file per server.

Used by the dialer when there is no cluster. A file describes one incarnation of one server; a stale file does no harm,
because its dial fails. Dials nothing.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from modelswarm.process.run_files import ServerFile
from modelswarm.protocol.identity import Address, PeerId
from modelswarm_gateway.discovery.dialer import Endpoint

log = logging.getLogger(__name__)

# Largest run file; larger files are ignored.
MAX_FILE_BYTES = 64 << 10

_Signature = tuple[int, int, int]
"""(inode, size, time of change): a file with the same is not read again."""


def _signature_of(entry: os.DirEntry[str]) -> _Signature | None:
    """Return the file's signature; None if it was removed, is a dangling link, or is not a regular file."""
    try:
        state = entry.stat()
    except OSError:
        return None
    if not stat.S_ISREG(state.st_mode):  # reading a pipe would wait for its writer
        return None
    return state.st_ino, state.st_size, state.st_mtime_ns


@dataclass(slots=True)
class _Known:
    """A run file that was read; `address` is None if its content is not valid."""

    signature: _Signature
    address: Address | None


class FileSource:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, _Known] = {}

    def endpoints(self) -> Mapping[PeerId, Endpoint]:
        """Read the files that changed, and return the endpoints of all."""
        self._read()
        return {k.address.peer: Endpoint(k.address) for k in self._files.values() if k.address}

    def is_listed(self) -> bool:
        return True  # each look is at the whole folder

    def expected_models(self) -> None:
        """Return None: a server is in the folder only once it can be linked."""

    def _read(self) -> None:
        seen: dict[str, _Signature] = {}
        try:
            with os.scandir(self._folder) as entries:
                for entry in entries:
                    if entry.name.endswith(".json") and not entry.name.startswith("."):
                        state = _signature_of(entry)
                        if state is not None:
                            seen[entry.name] = state
        except OSError as error:
            log.debug("cannot read the discovery folder: %s", error)
            return
        for name in self._files.keys() - seen.keys():
            del self._files[name]
        for name, signature in seen.items():
            known = self._files.get(name)
            if known is None or known.signature != signature:
                self._files[name] = _Known(signature, self._address(name, signature[1]))

    def _address(self, name: str, size: int) -> Address | None:
        path = self._folder / name
        if size > MAX_FILE_BYTES:
            log.warning("ignored %s: larger than %d bytes", path, MAX_FILE_BYTES)
            return None
        try:
            member = ServerFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            log.warning("ignored %s: not a run file: %s", path, str(error).splitlines()[0])
            return None
        return Address(member.peer, member.target)
