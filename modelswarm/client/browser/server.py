"""The HTTP server of the page: the page itself, its snapshots as server-sent events, chat turns and kills.

It listens on this machine alone. Each request has a thread; their number, their bodies and their waits are bounded.
Run by `modelswarm ui`, and by a gateway with `--ui`; `access.py` decides who may ask, `source.py` answers.
"""

from __future__ import annotations

import json
import secrets
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import unquote, urlsplit

from modelswarm.client.browser.access import (
    Refused,
    check_call,
    check_loopback,
    check_page,
    make_token,
)
from modelswarm.client.browser.source import Events, Source
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.process.json_text import to_json

MAX_BODY_BYTES = 1 << 20
MAX_REQUESTS = 32
"""Requests at a time: a page has two, and browsers keep few more open."""
SOCKET_SECONDS = 30.0
"""Longest wait for a client that neither reads nor writes."""
_KILL = "/api/servers/"
_POLICY = (
    "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, host: str, port: int, source: Source, *, flag: str = "--listen") -> None:
        """Listen on `host:port`, port 0: any free one. UserError if that is not possible, or not of this machine."""
        check_loopback(host, flag)
        self.source, self.token = source, make_token()
        self.is_stopped = threading.Event()
        self.places = threading.BoundedSemaphore(MAX_REQUESTS)
        self.page = files(__package__).joinpath("page.html").read_text("utf-8")
        try:
            super().__init__((host, port), PageHandler)
        except OSError as error:
            raise UserError(flag, f"cannot listen on {host}:{port}: {error.strerror}") from None

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/?token={self.token}"

    def stop(self) -> None:
        self.is_stopped.set()
        self.server_close()


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_SECONDS

    def do_GET(self) -> None:
        self._run(self._get)

    def do_POST(self) -> None:
        self._run(self._post)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Write no line for each request: the command prints only the address."""

    def _run(self, answer: Callable[[], None]) -> None:
        """Answer one request on a connection of its own."""
        self.close_connection = True
        if not self.server.places.acquire(blocking=False):
            self._send_json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "too many requests at once"})
            return
        try:
            answer()
        except Refused as refused:
            self._send_json(refused.status, {"error": refused.message})
        except UserError as error:
            self._send_json(HTTPStatus.BAD_REQUEST, {"error": str(error)})
        except ModelSwarmError as error:
            self._send_json(HTTPStatus.BAD_GATEWAY, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            return  # the browser has left
        finally:
            self.server.places.release()

    def _get(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            check_page(self.path, self.headers, self.server.token)
            return self._send_page()
        check_call(self.headers, self.server.token)
        if path == "/api/snapshots":
            return self._send_events(self.server.source.snapshots(self.server.is_stopped.is_set))
        raise Refused(HTTPStatus.NOT_FOUND, "nothing is at this path")

    def _post(self) -> None:
        check_call(self.headers, self.server.token)
        path, source = urlsplit(self.path).path, self.server.source
        if path == "/api/chat":
            session, events = source.chat(self._read_body(), self._has_left)
            return self._send_events(events, {"X-ModelSwarm-Session": session})
        if path.startswith(_KILL) and path.endswith("/kill") and source.can_kill:
            name = unquote(path.removeprefix(_KILL).removesuffix("/kill"))
            return self._send_json(HTTPStatus.OK, {"server": name, "pid": source.kill(name)})
        raise Refused(HTTPStatus.NOT_FOUND, "nothing is at this path")

    def _has_left(self) -> bool:
        """Return whether the browser has closed the connection of a request whose body was read."""
        with selectors.DefaultSelector() as look:
            look.register(self.connection, selectors.EVENT_READ)
            if not look.select(0):
                return False
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def _read_body(self) -> Mapping[str, Any]:
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise Refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"Content-Length: {length[:20]!r}; allowed: up to {MAX_BODY_BYTES}",
            )
        try:
            body = json.loads(self.rfile.read(int(length)))
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
        if not isinstance(body, dict):
            raise Refused(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
        return body

    def _send_page(self) -> None:
        nonce = secrets.token_urlsafe(16)
        text = self.server.page.replace("{{nonce}}", nonce).encode()
        self._send_head(
            HTTPStatus.OK,
            "text/html; charset=utf-8",
            {"Content-Security-Policy": _POLICY.format(nonce=nonce)},
        )
        self.wfile.write(text)

    def _send_events(self, events: Events, headers: Mapping[str, str] | None = None) -> None:
        """Send server-sent events until they end or the browser leaves."""
        self._send_head(HTTPStatus.OK, "text/event-stream", headers or {})
        with closing(events):  # a turn whose reader has left ends at once
            for event in events:
                self.wfile.write(f"data: {to_json(event)}\n\n".encode())

    def _send_json(self, status: HTTPStatus, fields: Mapping[str, Any]) -> None:
        self._send_head(status, "application/json", {})
        self.wfile.write(to_json(fields).encode())

    def _send_head(self, status: HTTPStatus, kind: str, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, **headers}.items():
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
