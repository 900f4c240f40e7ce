"""A foreign gateway whose answer has the pieces that a test gives it, one by one, and its page."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from support.ports import free_port
from typing_extensions import override

from modelswarm.client.browser.server import PageServer
from modelswarm.client.browser.source import Source

END = "data: [DONE]\n\n"
LOOK_SECONDS = 0.05


@dataclass
class HeldGateway:
    url: str = ""
    pieces: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)
    count: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    refusal: tuple[int, str] | None = None  # status and message, instead of an answer
    closed: list[str] = field(default_factory=list)  # names of sessions
    client_left: threading.Event = field(default_factory=threading.Event)
    has_ended: threading.Event = field(default_factory=threading.Event)

    def say(self, text: str) -> None:
        self._put({"content": text}, None)

    def end(self, reason: str = "stop") -> None:
        self._put({}, reason)
        self.pieces.put(END)

    def _put(self, delta: dict[str, str], reason: str | None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        self.count += 1
        self.pieces.put(f"id: {self.count}\ndata: {json.dumps({'choices': [choice]})}\n\n")


class QuietHandler(BaseHTTPRequestHandler):
    """Records which sessions are closed."""

    closed: list[str]

    def do_DELETE(self) -> None:
        self.closed.append(self.path.partition("?")[0].rpartition("/")[2])
        self._head(200, "application/json")
        self.wfile.write(b'{"deleted": true}')

    def _head(self, status: int, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.end_headers()

    @override
    def log_message(self, *_: Any) -> None:
        """Keep the output of tests free of the server's log."""


@contextmanager
def held_gateway() -> Iterator[HeldGateway]:
    state = HeldGateway()

    class Handler(QuietHandler):
        closed = state.closed

        def do_POST(self) -> None:
            state.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            if state.refusal is not None:
                status, message = state.refusal
                self._head(status, "application/json")
                error = {"message": message, "param": None, "code": "no_capacity"}
                self.wfile.write(json.dumps({"error": error}).encode())
                return
            self._head(200, "text/event-stream")
            self.connection.settimeout(LOOK_SECONDS)
            while not state.has_ended.is_set() and not self._has_client_left():
                if not state.pieces.empty():
                    piece = state.pieces.get()
                    self.wfile.write(piece.encode())
                    if piece == END:
                        return

        def _has_client_left(self) -> bool:
            try:
                if self.connection.recv(1) != b"":
                    return False
            except TimeoutError:
                return False
            except ConnectionError:
                pass
            state.client_left.set()
            return True

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{made.server_port}"
    thread = threading.Thread(target=made.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield state
    finally:
        state.has_ended.set()
        made.shutdown()
        thread.join()
        made.server_close()


@contextmanager
def page_of(gateway: HeldGateway) -> Iterator[PageServer]:
    """Serve the page of the gateway, in this process. Nothing answers at its admin port."""
    server = PageServer("127.0.0.1", 0, Source(f"127.0.0.1:{free_port()}", gateway.url))
    serving = threading.Thread(target=server.serve_forever, args=(0.05,))
    serving.start()
    try:
        yield server
    finally:
        server.shutdown()
        serving.join()
        server.stop()
