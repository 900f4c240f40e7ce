"""Data and actions of the page: snapshots of the gateway, chat turns, and kills of servers of this machine.

Used by `server.py`, from several threads. Knows no HTTP of its own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from modelswarm.client.api.sync_client import Client
from modelswarm.client.message_fields import message_fields
from modelswarm.client.swarm import SwarmClient
from modelswarm.errors import ModelSwarmError, UserError
from modelswarm.local.run_folder import LocalProcess, RunInfo, list_runs, server_processes
from modelswarm.protocol.identity import name_of, session_wire_name

SNAPSHOT_SECONDS = 0.5
"""Time between two looks at the swarm; the gateway makes no newer snapshots for its own watchers either."""
KEEPALIVE_SECONDS = 5.0
"""Longest time without an event: a page that has gone is noticed by then."""
LEAVE_SECONDS = 0.2
"""Time between two looks whether the browser has left a turn."""
MAX_MESSAGES = 1000
Events: TypeAlias = Generator[dict[str, Any], None, None]
CHAT_FIELDS = ("model", "messages", "session_id")


@dataclass(frozen=True, slots=True)
class Source:
    admin: str  # `host:port` of a gateway's admin API
    http: str | None  # URL of a gateway; None: only an admin address is known, so there is no chat
    run: RunInfo | None = None  # the swarm, if `modelswarm up` runs it on this machine

    @property
    def can_kill(self) -> bool:
        return self.run is not None

    def snapshots(self, is_stopped: Callable[[], bool]) -> Events:
        """Yield each new snapshot; the same one again after a while, and `error` while the gateway is away."""
        shown: dict[str, Any] = {}
        at = 0.0
        with SwarmClient(self.admin) as client:
            while not is_stopped():
                found = self._fetch(client)
                if found != shown or time.monotonic() - at > KEEPALIVE_SECONDS:
                    yield found
                    shown, at = found, time.monotonic()
                time.sleep(SNAPSHOT_SECONDS)

    def _fetch(self, client: SwarmClient) -> dict[str, Any]:
        can = {"can_kill": self.can_kill, "can_chat": self.http is not None}
        try:
            shown = message_fields(client.fetch_snapshot())
        except ModelSwarmError as error:
            return {**can, "error": str(error)}
        return {**can, "error": None, "swarm": self.run.name if self.run else None, **shown}

    def chat(self, body: Mapping[str, Any], has_left: Callable[[], bool]) -> tuple[str, Events]:
        """Return the session as snapshots name it, and the events of one turn. Raise UserError for a wrong body.

        `has_left` is called by another thread, until it returns True: then the turn ends, also one without a token.
        """
        if self.http is None:
            raise UserError("--url", "needed for a chat; allowed: the gateway's HTTP address")
        model, messages, session = _check_chat(body)
        events = self._answer(self.http, model, messages, session, has_left)
        return session_wire_name(model, session), events

    def _answer(
        self,
        base: str,
        model: str,
        messages: list[dict[str, str]],
        session: str,
        has_left: Callable[[], bool],
    ) -> Events:
        """Yield pieces of reasoning and text, breaks of the connection and the end.

        The turn survives a loss of the gateway.
        """
        breaks: list[str] = []

        def note(error: ModelSwarmError) -> None:
            breaks.append(str(error))

        try:
            with (
                Client(base, max_retries=0, on_break=note) as client,
                _closed_when(has_left, client),
                closing(client.stream_chat(messages, model=model, session_id=session)) as chunks,
            ):
                for chunk in chunks:
                    while breaks:
                        yield {"note": breaks.pop(0)}
                    if chunk.text or chunk.reasoning_content or chunk.finish_reason:
                        yield {
                            "reasoning": chunk.reasoning_content,
                            "text": chunk.text,
                            "finish_reason": chunk.finish_reason,
                        }
        except ModelSwarmError as error:
            yield {"error": str(error)}

    def kill(self, server: str) -> int:
        """Kill the process of a server at once; return its process id. Raise UserError if it is not of this machine."""
        run = self.run
        if run is None:
            raise UserError("server", "the swarm runs elsewhere; only local ones are killed here")
        if all((each.name, each.pid) != (run.name, run.pid) for each in list_runs()):
            raise UserError("server", f"the swarm {run.name!r} has ended")
        found = {name_of(peer): each for peer, each in server_processes(run.name).items()}
        process = found.get(server)
        if process is None or not _is_child(process, run.pid):
            known = ", ".join(sorted(found)) or "none is ready"
            raise UserError("server", f"{server[:80]!r} does not run here; allowed: {known}")
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            raise UserError("server", f"{server!r} has ended already") from None
        return process.pid


@contextmanager
def _closed_when(has_left: Callable[[], bool], client: Client) -> Iterator[None]:
    """Close the client, and so end its stream, when the browser has left: a held session sends nothing meanwhile."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LEAVE_SECONDS):
            if has_left():
                return client.close()

    watching = threading.Thread(target=watch, name="page-turn", daemon=True)
    watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join()


def _is_child(process: LocalProcess, parent: int) -> bool:
    """Return False if the process id belongs to another process by now, where Linux tells."""
    try:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    except OSError:
        return not Path("/proc/self/status").exists()
    return f"PPid:\t{parent}" in lines


def _check_chat(body: Mapping[str, Any]) -> tuple[str, list[dict[str, str]], str]:
    unknown = sorted(set(body) - set(CHAT_FIELDS))
    if unknown:
        raise UserError(unknown[0], f"not allowed; allowed: {', '.join(CHAT_FIELDS)}")
    model, messages, session = (body.get(name) for name in CHAT_FIELDS)
    if not isinstance(model, str) or not isinstance(session, str):
        raise UserError("model", "and session_id must be texts")
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise UserError("messages", f"must be a list of 1 to {MAX_MESSAGES}")
    if not all(isinstance(each, dict) for each in messages):
        raise UserError("messages", "must be objects with role and content")
    return model, messages, session
