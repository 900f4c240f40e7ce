"""The bytes of a link's connection as messages, so that a proxy can cut, double and name them.

Used by `proxy.py`. A message is `kind u8 | 0 0 0 | length u32`, then its body (`modelswarm.protocol.link.stream`).
"""

from __future__ import annotations

import struct

from modelswarm.protocol.messages import Hello
from modelswarm.protocol.wire.codec import FrameError
from modelswarm.protocol.wire.frames import unpack

_HEADER = struct.Struct("<BxxxI")
_MESSAGE = 0


class FrameCutter:
    """Splits one direction of a connection into whole messages, each with its header."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        self._bytes += data
        found = []
        while len(self._bytes) >= _HEADER.size:
            size = _HEADER.size + _HEADER.unpack_from(self._bytes)[1]
            if len(self._bytes) < size:
                break
            found.append(bytes(self._bytes[:size]))
            del self._bytes[:size]
        return found


def message_of(frame: bytes) -> bytes | None:
    """Return the body of a message of the link; None for a keepalive and an end."""
    return frame[_HEADER.size :] if frame[0] == _MESSAGE else None


def hello_of(frame: bytes) -> Hello | None:
    """Return the Hello in this message, or None."""
    message = message_of(frame)
    if message is None:
        return None
    try:
        first = unpack(message)[0]
    except FrameError:
        return None
    return first if isinstance(first, Hello) else None
