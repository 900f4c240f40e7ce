"""Session ids in headers: clients that cannot set `session_id` in a body send one, and every answer names its session.

Used by the HTTP API. Which headers are read is a setting of the gateway, because routers of other systems have names
of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from modelswarm_gateway.errors import invalid_request
from modelswarm_gateway.generation.request import MAX_SESSION_ID_LENGTH
from modelswarm_gateway.settings import SESSION_HEADER

# Visible ASCII: it can neither break a header nor a log line.
_VALID = re.compile(rf"[!-~]{{1,{MAX_SESSION_ID_LENGTH}}}")


def take_session_id(body: object, headers: Mapping[str, str], names: Sequence[str]) -> object:
    """Return the body with the session id of the first of these headers that is there. Raise ApiError."""
    found = next((name for name in names if name in headers), None)
    if found is None or not isinstance(body, dict):
        return body
    value = headers[found]
    if not _VALID.fullmatch(value):
        detail = f"must be 1 to {MAX_SESSION_ID_LENGTH} visible ASCII characters without blanks"
        raise invalid_request(found, f"{found}: {detail}; leave it out or send such an id")
    given: Any = body.get("session_id")
    if given is not None and given != value:
        raise invalid_request(found, f"{found}: it differs from session_id; send one of the two")
    return body | {"session_id": value}


def refuse_session_id(headers: Mapping[str, str], names: Sequence[str], why: str) -> None:
    """Raise ApiError if a request that names its session in another way has one of these headers."""
    for name in names:
        if name in headers:
            raise invalid_request(name, f"{name}: not allowed here: {why}; leave it out")


def session_headers(session_id: str | None) -> list[tuple[bytes, bytes]]:
    """Return the header that names the session of an answer; none for an id that no header can carry."""
    if session_id is None or not _VALID.fullmatch(session_id):
        return []
    return [(SESSION_HEADER.encode(), session_id.encode())]
