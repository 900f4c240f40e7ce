"""The check of `--cors-origin`, a flag of the gateway and of `modelswarm up`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from modelswarm.errors import UserError

# An origin as browsers send it: lower case, without a path (RFC 6454).
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def check_cors_origins(origins: Sequence[str]) -> None:
    """Raise UserError for an origin that no browser sends."""
    for origin in origins:
        scheme, _, host = origin.partition("://")
        port = _DEFAULT_PORTS.get(scheme, "")
        if origin == "*":
            if len(origins) > 1:
                raise UserError("--cors-origin", "'*' allows every origin: give it alone")
        elif not _ORIGIN.fullmatch(origin):
            raise UserError(
                "--cors-origin",
                f"{origin!r} is not an origin, like https://chat.example.com: scheme, host and port in lower case, "
                "without a path; '*' allows any",
            )
        elif port and host.endswith(port):
            raise UserError(
                "--cors-origin", f"{origin!r}: browsers leave out the default port; remove {port}"
            )
