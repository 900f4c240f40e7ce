"""Messages between the gateway and the processes of a model: a head in JSON, and bytes that are not JSON.

Used on both ends, `model_process.py` and `model_worker.py`. Each message has the lengths of its two parts before it.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

_LENGTHS = struct.Struct("!II")
# Bytes of a head; a prompt's characters may take six bytes each.
_MAX_HEAD_BYTES = 128 << 20
# Bytes after the head: a tokenizer.json, or the ids or texts of tokens.
_MAX_DATA_BYTES = 128 << 20


def pack_message(head: dict[str, Any], data: bytes = b"") -> bytes:
    """Return the bytes of a message. Raise ValueError or RecursionError if the head cannot be JSON."""
    content = json.dumps(head).encode()
    return b"".join((_LENGTHS.pack(len(content), len(data)), content, data))


def receive_message(connection: socket.socket) -> tuple[dict[str, Any], bytes] | None:
    """Return the next message; None if the other end is closed or sends no message."""
    lengths = _receive(connection, _LENGTHS.size)
    if lengths is None:
        return None
    head_bytes, data_bytes = _LENGTHS.unpack(lengths)
    if head_bytes > _MAX_HEAD_BYTES or data_bytes > _MAX_DATA_BYTES:
        return None
    head = _receive(connection, head_bytes)
    data = None if head is None else _receive(connection, data_bytes)
    return None if head is None or data is None else (json.loads(head), bytes(data))


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    content = bytearray()
    while len(content) < size:
        try:
            part = connection.recv(min(size - len(content), 1 << 20))
        except ConnectionResetError:  # it ended before it had read all
            return None
        if not part:
            return None
        content += part
    return content
