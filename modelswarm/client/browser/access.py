"""The right to use the page: a random token in its URL, and requests of no other site.

Any page that the user visits can send requests to ports of this machine. It can neither read the token nor set a
header without asking. A name of its own that leads here (DNS rebinding) shows in Host. Pure: knows no socket.
"""

from __future__ import annotations

import hmac
import secrets
from email.message import Message
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

from modelswarm.errors import UserError

TOKEN_HEADER = "X-ModelSwarm-Token"
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names by which a browser of this machine reaches it. Other ports than ours are allowed: an SSH tunnel has its own."""
_OWN_FETCHES = ("same-origin", "none")
"""Values of Sec-Fetch-Site for requests of this page, and for an address that the user typed."""


class Refused(Exception):
    """The request is not answered; the text says why."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


def make_token() -> str:
    return secrets.token_urlsafe(32)


def check_loopback(host: str, flag: str) -> None:
    """Raise UserError unless only this machine can reach the address."""
    if host not in ("127.0.0.1", "localhost"):
        raise UserError(
            flag,
            f"{host!r} is not an address of this machine alone; allowed: 127.0.0.1:PORT, and from elsewhere a tunnel "
            "to it: ssh -L, or kubectl port-forward",
        )


def check_page(path: str, headers: Message, token: str) -> None:
    """Raise Refused unless the request for the page comes from this machine and its URL has the token."""
    _check_site(headers, is_page=True)
    given = parse_qs(urlsplit(path).query).get("token", [""])[0]
    if not _is_equal(given, token):
        raise Refused(
            HTTPStatus.FORBIDDEN, "the address has no valid token; open the one that was printed"
        )


def check_call(headers: Message, token: str) -> None:
    """Raise Refused unless the page itself sent this request, with the token in a header."""
    _check_site(headers, is_page=False)
    if not _is_equal(headers.get(TOKEN_HEADER, ""), token):
        raise Refused(
            HTTPStatus.FORBIDDEN,
            f"{TOKEN_HEADER} has no valid token; open the address that was printed last",
        )


def _check_site(headers: Message, *, is_page: bool) -> None:
    host = headers.get("Host", "")
    name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
    if name not in _HOSTS:
        raise Refused(
            HTTPStatus.FORBIDDEN,
            f"Host: {host[:80]!r} is not allowed; allowed: {', '.join(_HOSTS)}",
        )
    origin = headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        raise Refused(HTTPStatus.FORBIDDEN, f"Origin: {origin[:80]!r} is another site")
    site = headers.get("Sec-Fetch-Site")
    # A link on another page may lead to the page: it shows nothing without the token.
    if site is not None and site not in _OWN_FETCHES and not is_page:
        raise Refused(HTTPStatus.FORBIDDEN, f"Sec-Fetch-Site: {site[:80]!r} is another site")


def _is_equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())
