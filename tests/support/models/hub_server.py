"""A Hugging Face endpoint on localhost that serves one folder as one model, and records what was fetched."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlparse

from typing_extensions import override

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """`fetched`: names of files that were sent whole; `ranged`: of files that were sent in part."""

    name: str
    folder: Path
    url: str = ""
    fetched: list[str] = field(default_factory=list)
    ranged: list[str] = field(default_factory=list)
    token: str | None = None  # that callers must send
    hashes_weights: bool = False  # weights are stored as large files, whose hash is their SHA-256
    damaged: set[str] = field(default_factory=set)  # files that are sent with one wrong byte


@contextmanager
def serve(name: str, folder: Path) -> Iterator[Hub]:
    hub = Hub(name, folder)

    class Handler(_Handler):
        pass

    Handler.hub = hub
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    """The three calls of a snapshot download: commit, list of files, files."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        name = self.hub.name
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return
        if path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
            self._json({"id": name, "sha": COMMIT, "siblings": []})
        elif path == f"/api/models/{name}/tree/{COMMIT}":
            self._json([self._leaf(file) for file in sorted(self.hub.folder.iterdir())])
        elif path.startswith(f"/{name}/resolve/"):
            self._file(path.rsplit("/", 1)[1], with_body)
        else:
            self._missing(path)

    def _leaf(self, file: Path) -> dict[str, object]:
        return {"type": "file", "path": file.name, "size": file.stat().st_size, "oid": _etag(file)}

    def _headers_of(self, path: Path) -> dict[str, str]:
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT}
        if self.hub.hashes_weights and path.suffix == ".safetensors":
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(path.read_bytes()).hexdigest()}"'
            headers["X-Linked-Size"] = str(path.stat().st_size)
        return headers

    def _missing(self, path: str) -> None:
        kind = "RevisionNotFound" if self.hub.name in path else "RepoNotFound"
        self._send(404, b"{}", {"X-Error-Code": kind, "X-Error-Message": "not here"})

    def _file(self, file: str, with_body: bool) -> None:
        if not (self.hub.folder / file).is_file():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        body = (self.hub.folder / file).read_bytes()
        headers = self._headers_of(self.hub.folder / file)
        if file in self.hub.damaged:
            body = body[:-1] + bytes([body[-1] ^ 1])
        asked = self.headers.get("Range")
        if asked is not None:
            self.hub.ranged.append(file)
            first, last = asked.removeprefix("bytes=").split("-")
            self._send(206, body[int(first) : int(last) + 1], headers)
            return
        if with_body:
            self.hub.fetched.append(file)
        self._send(200, body, headers, with_body=with_body)

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, body: bytes, headers: dict[str, str], *, with_body: bool = True
    ) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)

    @override
    def log_message(self, *_: object) -> None:
        """Log nothing: tests read `fetched`."""


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
