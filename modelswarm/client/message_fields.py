"""Messages of api.proto as plain objects.

proto3's own JSON leaves zeros out and writes 64-bit numbers as strings. Used by `status`, `routes`, `drain`
and the page for a browser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from modelswarm.protocol.identity import name_of

_SERVER_NAMES = {"peer": "server", "best": "best_server"}
"""Fields that hold a peer, and the field beside them with its name as the tables have it."""


def message_fields(message: Message) -> dict[str, Any]:
    """Return all fields by their names; optional ones that are unset as None. Peers get their server's name too."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = _value(message, field.name, field.is_repeated, field.has_presence)
        if field.name in _SERVER_NAMES and isinstance(value, str):
            fields[_SERVER_NAMES[field.name]] = name_of(value)
        if field.name == "id":
            fields["session"] = session_name(str(value))
        fields[field.name] = value
    return fields


def session_name(session_id: str) -> str:
    """Return the name of a session as tables have it."""
    return session_id.rsplit(":", 1)[-1]


def _value(message: Message, name: str, is_repeated: bool, has_presence: bool) -> Any:
    value = getattr(message, name)
    if is_repeated:
        assert isinstance(value, Sequence)
        return [message_fields(part) if isinstance(part, Message) else part for part in value]
    if has_presence and not message.HasField(name):
        return None
    return message_fields(value) if isinstance(value, Message) else value
