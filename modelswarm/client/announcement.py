"""The addresses of a gateway's APIs, as it announces them at `GET /version`.

Used by commands that know only the HTTP address, or several gateways of this machine. Imports no HTTP library: those
take longer to import than the request takes.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from urllib.parse import urlsplit

from modelswarm.errors import UnreachableError

# Time for the connection, and for each part of the answer, in seconds.
ANSWER_SECONDS = 5.0
# As above, if other gateways can be asked instead.
CHOICE_SECONDS = 1.0
# Largest body that is read; an announcement has about 100 bytes.
MAX_ANSWER_BYTES = 1 << 16


def announced_admin_port(base: str, timeout: float = ANSWER_SECONDS) -> int:
    """Return the admin port of the gateway with the URL `base`. UnreachableError if no gateway answers there."""
    found = _announced(base, "admin_port", timeout)
    if found is None:
        raise UnreachableError(f"{base} is not the address of a gateway", base, "HTTP")
    return found


def announced_grpc_port(base: str, timeout: float = ANSWER_SECONDS) -> int | None:
    """Return the gRPC port of the gateway with the URL `base`; None: it has none. Raise UnreachableError likewise."""
    return _announced(base, "grpc_port", timeout)


def _announced(base: str, name: str, timeout: float) -> int | None:
    parts = urlsplit(base)
    is_secure = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_secure else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port or kind.default_port, timeout=timeout)
    try:
        connection.request("GET", f"{parts.path}/version")
        body = connection.getresponse().read(MAX_ANSWER_BYTES)
        found = json.loads(body.decode(errors="replace"))[name]
        return None if found is None else int(found)
    except (OSError, UnicodeError, http.client.HTTPException) as error:
        raise UnreachableError(f"no gateway answers at {base}", base, "HTTP") from error
    except (ValueError, KeyError, TypeError):
        raise UnreachableError(f"{base} is not the address of a gateway", base, "HTTP") from None
    finally:
        connection.close()


def first_that_answers(urls: Sequence[str]) -> int:
    """Return the index of the first gateway that answers, or 0 if none does."""
    for index, url in enumerate(urls):
        try:
            announced_admin_port(url, CHOICE_SECONDS)
        except UnreachableError:
            continue
        return index
    return 0
