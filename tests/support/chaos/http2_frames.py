"""The bytes of a link's connection as HTTP/2 frames, so that a proxy can cut, double and name them.

Used by `proxy.py`. A frame is `length u24 | type | flags | stream u32`, then the payload. In a DATA frame gRPC sends
`compressed u8 | length u32` and one message. Knows nothing else of either.
"""

from __future__ import annotations

from modelswarm.protocol.messages import Hello
from modelswarm.protocol.wire.codec import FrameError
from modelswarm.protocol.wire.frames import unpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # the first bytes of an HTTP/2 client
_HEAD, _MESSAGE_HEAD = 9, 5
_DATA, _PING, _ACK = 0, 6, 1


class FrameCutter:
    """Splits one direction of a connection into whole frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._begun = False

    def feed(self, data: bytes) -> list[bytes]:
        self._bytes += data
        found = []
        while (size := self._next()) and len(self._bytes) >= size:
            found.append(bytes(self._bytes[:size]))
            del self._bytes[:size]
        return found

    def _next(self) -> int:
        """Return the length of the first frame; 0 until its header is complete."""
        if not self._begun and self._bytes:
            if self._bytes[0] == PREFACE[0] and len(self._bytes) < len(PREFACE):
                return 0
            self._begun = True
            if self._bytes.startswith(PREFACE):
                return len(PREFACE)
        return _HEAD + int.from_bytes(self._bytes[:3], "big") if len(self._bytes) >= _HEAD else 0


def message_of(frame: bytes) -> bytes | None:
    """Return the gRPC message of a frame that carries exactly one: only those can be doubled."""
    if len(frame) < _HEAD + _MESSAGE_HEAD or frame.startswith(PREFACE):
        return None
    kind, flags, compressed = frame[3], frame[4], frame[_HEAD]
    length = int.from_bytes(frame[_HEAD + 1 : _HEAD + _MESSAGE_HEAD], "big")
    whole = length == len(frame) - _HEAD - _MESSAGE_HEAD
    alone = kind == _DATA and not flags and not compressed and whole
    return frame[_HEAD + _MESSAGE_HEAD :] if alone else None


def is_ping(frame: bytes) -> bool:
    """Return True for a PING frame that is no acknowledgement."""
    return not frame.startswith(PREFACE) and frame[3] == _PING and not frame[4] & _ACK


def hello_of(frame: bytes) -> Hello | None:
    """Return the Hello in this frame, or None."""
    message = message_of(frame)
    if message is None:
        return None
    try:
        first = unpack(message)[0]
    except FrameError:
        return None
    return first if isinstance(first, Hello) else None
