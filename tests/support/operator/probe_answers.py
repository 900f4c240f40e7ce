"""A server's probe port at its own loopback address, with the same answer to every request."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from typing_extensions import override


@contextmanager
def serve_json(body: object, port: int) -> Iterator[str]:
    """Answer with 503 and this body; yield the address."""
    content = json.dumps(body).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        @override
        def log_message(self, format: str, *args: object) -> None:
            """Log nothing."""

    address = f"127.77.{os.getpid() // 250 % 250}.{1 + os.getpid() % 250}"
    with ThreadingHTTPServer((address, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield address
        finally:
            server.shutdown()
            thread.join()
