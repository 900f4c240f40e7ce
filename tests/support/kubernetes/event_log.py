"""A watch of the API server that records the times of events, for timelines of tests and benchmarks.

One thread per path. It begins with the existing objects, ends with `close`, and restarts a broken watch, as tests may
kill the API server. Times are `time.perf_counter()` at this client.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx
from support.kubernetes.api_client import ApiClient, Json

AGAIN_SECONDS = 0.1
CLOSE_SECONDS = 120.0  # seconds; longer than the limit of a request
Seen = Callable[[float, str, Json], None]  # time; ADDED, MODIFIED or DELETED; object


class Watch:
    """Calls `seen` in its own thread for every event."""

    def __init__(self, plain: ApiClient, path: str, selector: str, seen: Seen) -> None:
        self._plain = plain
        self._path = path
        self._selector = selector
        self._seen = seen
        self._closed = threading.Event()
        self._socket: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, so that the client can be closed. Later events are ignored."""
        self._closed.set()
        if self._socket is not None:
            _shut(self._socket)
        self._thread.join(CLOSE_SECONDS)
        assert not self._thread.is_alive(), f"the watch of {self._path} does not end"

    def _opened(self, connection: socket.socket) -> None:
        self._socket = connection
        if self._closed.is_set():
            _shut(connection)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                query = {"labelSelector": self._selector, "watch": "1"}
                for line in self._plain.watch_lines(self._path, self._opened, **query):
                    if self._closed.is_set():
                        return
                    event = json.loads(line)
                    if event["type"] != "ERROR":
                        self._seen(time.perf_counter(), event["type"], event["object"])
            except httpx.HTTPError:
                pass  # restarted by the loop
            self._closed.wait(AGAIN_SECONDS)


def _shut(connection: socket.socket) -> None:
    """Shut the reader's connection below TLS, as the TLS state belongs to the reader."""
    with contextlib.suppress(OSError):  # it is closed already
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@dataclass(slots=True)
class PodTimes:
    """Times of the events of one pod; 0: not yet."""

    name: str
    slot: str
    node: str = ""
    created: float = 0.0
    ready: float = 0.0
    unready: float = 0.0
    terminating: float = 0.0
    gone: float = 0.0
    restarts: int = 0


class PodLog:
    """The event times of all server pods of a namespace. `on_change` gets a text for every change."""

    def __init__(self, on_change: Callable[[float, str], None] | None = None) -> None:
        self._on_change = on_change or (lambda _when, _words: None)
        self._lives: dict[str, PodTimes] = {}
        self._changed = threading.Condition()

    def seen(self, when: float, kind: str, pod: Json) -> None:
        meta = pod["metadata"]
        with self._changed:
            life = self._lives.get(meta["name"])
            if life is None:
                slot = meta["labels"]["modelswarm.io/slot"]
                life = self._lives[meta["name"]] = PodTimes(meta["name"], slot, created=when)
                self._on_change(when, f"{life.name} is created for slot {slot}")
            self._update(when, kind, pod, life)
            self._changed.notify_all()

    def _update(self, when: float, kind: str, pod: Json, life: PodTimes) -> None:
        life.node = pod["spec"].get("nodeName", "")
        if kind == "DELETED":
            life.gone = when
            self._on_change(when, f"{life.name} is gone")
            return
        if pod["metadata"].get("deletionTimestamp") and not life.terminating:
            life.terminating = when
            self._on_change(when, f"{life.name} is Terminating")
        restarts = sum(each["restartCount"] for each in _containers(pod))
        if restarts > life.restarts:
            life.restarts = restarts
            self._on_change(when, f"{life.name}: its container runs again")
        ready = _ready(pod)
        if ready and life.ready <= life.unready:
            life.ready = when
            self._on_change(when, f"{life.name} is Ready on {life.node}")
        elif not ready and life.ready > life.unready:
            life.unready = when
            self._on_change(when, f"{life.name} is not Ready")

    def wait(
        self, what: str, found: Callable[[list[PodTimes]], PodTimes | None], seconds: float
    ) -> PodTimes:
        """Wait for a pod that `found` returns, and return it."""
        with self._changed:
            life = self._changed.wait_for(lambda: found(list(self._lives.values())), seconds)
            if life is None:
                raise AssertionError(f"{what}: not within {seconds:g} s; {self._lives}")
            return life

    def wait_ready_again(self, name: str, after: float, seconds: float) -> PodTimes:
        """Wait until the pod is Ready again with a container started after `after`."""
        before = self._lives[name].restarts

        def found(lives: list[PodTimes]) -> PodTimes | None:
            mine = (life for life in lives if life.name == name)
            good = (life for life in mine if life.ready > after and life.restarts > before)
            return next(good, None)

        return self.wait(f"{name} being Ready again", found, seconds)

    def wait_successor(self, of: str, after: float, seconds: float) -> PodTimes:
        """Wait for the pod that was created for the same slot after `after` to be Ready, and return it."""
        slot = self._lives[of].slot
        return self.wait(
            f"a Ready successor of {of}",
            lambda lives: next(
                (
                    life
                    for life in lives
                    if life.slot == slot and life.created > after and life.ready
                ),
                None,
            ),
            seconds,
        )


def _containers(pod: Json) -> list[Json]:
    return list(pod["status"].get("containerStatuses") or ())


def _ready(pod: Json) -> bool:
    conditions = pod["status"].get("conditions") or ()
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
