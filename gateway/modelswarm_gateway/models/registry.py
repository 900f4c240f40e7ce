"""The models this gateway has met: what their servers said of them, and their tokenizer files.

The node tells it of links and hands it file chunks; it asks servers for files and builds `ModelText` from them, once
per model and revision. A model stays known when its servers go, so that a client hears "no servers" and not "no such
model"; where pods tell which models there are, it is forgotten some time after its last pod. Knows no sessions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from modelswarm.protocol.identity import PeerId
from modelswarm.protocol.messages import Hello, Lane, ModelFileChunk, ModelFileRequest, Send
from modelswarm.protocol.messages import reply_address as reply
from modelswarm_gateway.models.tokenizer import (
    OPTIONAL_FILES,
    REQUIRED_FILES,
    ModelFilesError,
    ModelTokenizer,
)

log = logging.getLogger(__name__)

FILES = (*REQUIRED_FILES, *OPTIONAL_FILES)
MAX_FILE_BYTES = 256 << 20  # of one file
FETCH_SECONDS = 60.0  # for all files of a model; then another server is asked
RETRY_SECONDS = 5.0  # after files that cannot be used
FORGET_SECONDS = 600.0  # after which a model that nobody has any more is forgotten
MAX_MODELS = 256


@dataclass(slots=True)
class _Fetch:
    """Files that are coming from one server."""

    peer: PeerId
    revision: str
    deadline: float
    parts: dict[str, bytearray] = field(default_factory=dict)
    done: dict[str, bytes | None] = field(default_factory=dict)  # None: the model has no such file

    @property
    def complete(self) -> bool:
        return len(self.done) == len(FILES)

    @property
    def files(self) -> dict[str, bytes]:
        return {name: content for name, content in self.done.items() if content is not None}


@dataclass(slots=True)
class ModelEntry:
    """One model."""

    name: str
    n_blocks: int
    known_since: int  # unix seconds
    revision: str = ""  # of `text`
    tokenizer: ModelTokenizer | None = None
    servers: dict[PeerId, Hello] = field(default_factory=dict)
    fetch: _Fetch | None = None
    retry_at: float = 0.0
    unused_since: float | None = None  # since when nobody has it

    def server_to_ask(self, leading: str | None) -> Hello | None:
        """Whose files are needed, if any are: there are none, or those of a revision that turns do not run on."""
        hellos = list(self.servers.values())
        of_use = [hello for hello in hellos if hello.revision == leading] or hellos
        if self.tokenizer is not None and self.revision in {hello.revision for hello in of_use}:
            return None
        return of_use[-1] if of_use else None


class ModelRegistry:
    def __init__(
        self,
        send: Callable[[list[Send]], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_change: Callable[[], None],
        active_revision: Callable[[str], str | None] = lambda model: None,
    ) -> None:
        """`changed` is called whenever an entry says something new. `leading`: the revision that turns run on."""
        self._active_revision = active_revision
        self._send, self._clock, self._wall, self._on_change = send, clock, wall, on_change
        self._entries: dict[str, ModelEntry] = {}
        self._expected: frozenset[str] | None = None
        self._building: set[asyncio.Task[None]] = set()

    def entries(self) -> list[ModelEntry]:
        return list(self._entries.values())

    def is_settled(self) -> bool:
        """Whether the tokenizers of all models that have servers are here, or cannot be had."""
        return all(
            e.tokenizer is not None or e.retry_at > 0 for e in self._entries.values() if e.servers
        )

    def set_expected(self, models: frozenset[str] | None) -> None:
        """Models that have servers, or are to have some; None: nobody knows."""
        if models == self._expected:
            return
        self._expected = models
        for name in models or ():
            self._entry(name, name)
        self._on_change()

    def _entry(self, name: str, who: str) -> ModelEntry | None:
        entry = self._entries.get(name)
        if entry is None:
            if len(self._entries) >= MAX_MODELS:
                log.warning("%s: one model too many: %s", who, name)
                return None
            entry = self._entries[name] = ModelEntry(name, 0, int(self._wall()))
        return entry

    def on_peer_connected(self, hello: Hello) -> None:
        entry = self._entry(hello.model, hello.peer)
        if entry is None:
            return
        entry.n_blocks = hello.n_blocks
        entry.servers[hello.peer] = hello
        entry.retry_at = 0.0
        self._request_files(entry)
        self._on_change()

    def on_peer_lost(self, peer: PeerId) -> None:
        for entry in self._entries.values():
            if entry.servers.pop(peer, None) is not None:
                if entry.fetch is not None and entry.fetch.peer == peer:
                    entry.fetch = None
                self._request_files(entry)
                self._on_change()

    def tick(self) -> None:
        """Ends waits for servers that do not answer, and pauses; forgets what is gone."""
        now = self._clock()
        self._forget_unused(now)
        for entry in self._entries.values():
            if entry.fetch is not None and now >= entry.fetch.deadline:
                log.warning("%s: files did not come from %s in time", entry.name, entry.fetch.peer)
                entry.fetch = None
            self._request_files(entry)

    def _forget_unused(self, now: float) -> None:
        if self._expected is None:
            return
        for entry in list(self._entries.values()):
            if entry.servers or entry.name in self._expected:
                entry.unused_since = None
            elif entry.unused_since is None:
                entry.unused_since = now
            elif now - entry.unused_since > FORGET_SECONDS:
                log.info("%s is forgotten: nobody has it any more", entry.name)
                del self._entries[entry.name]
                self._on_change()

    def on_file_chunk(self, peer: PeerId, chunk: ModelFileChunk) -> None:
        for entry in self._entries.values():
            fetch = entry.fetch
            if fetch is not None and fetch.peer == peer:
                self._store_chunk(entry, fetch, chunk)

    async def close(self) -> None:
        for task in self._building:
            task.cancel()
        await asyncio.gather(*self._building, return_exceptions=True)

    def _request_files(self, entry: ModelEntry) -> None:
        now = self._clock()
        hello = entry.server_to_ask(self._active_revision(entry.name))
        if entry.fetch is not None or hello is None or now < entry.retry_at:
            return
        peer = hello.peer
        entry.fetch = _Fetch(peer, hello.revision, now + FETCH_SECONDS)
        requests = [Send(reply(peer), Lane.LIVE, ModelFileRequest(name)) for name in FILES]
        self._send(requests)

    def _store_chunk(self, entry: ModelEntry, fetch: _Fetch, chunk: ModelFileChunk) -> None:
        if chunk.name not in FILES or chunk.name in fetch.done:
            return
        if chunk.missing:
            fetch.done[chunk.name] = None
        else:
            part = fetch.parts.setdefault(chunk.name, bytearray())
            if chunk.offset != len(part) or chunk.total > MAX_FILE_BYTES:
                self._give_up(entry, f"{chunk.name}: its parts do not fit")
                return
            part += chunk.data
            if len(part) >= chunk.total:
                fetch.done[chunk.name] = bytes(part)
                del fetch.parts[chunk.name]
        if fetch.complete:
            task = asyncio.get_running_loop().create_task(self._build_tokenizer(entry, fetch))
            self._building.add(task)
            task.add_done_callback(self._building.discard)

    async def _build_tokenizer(self, entry: ModelEntry, fetch: _Fetch) -> None:
        try:
            text = await asyncio.to_thread(ModelTokenizer, fetch.files)
        except ModelFilesError as error:
            if entry.fetch is fetch:
                self._give_up(entry, str(error))
            return
        except Exception as error:  # files can be wrong in more ways than libraries tell apart
            log.exception("the files of %s", entry.name)
            if entry.fetch is fetch:
                self._give_up(entry, f"{type(error).__name__}: {error}")
            return
        entry.tokenizer, entry.revision = text, fetch.revision
        if entry.fetch is fetch:
            entry.fetch = None
        log.info("%s: its tokenizer is loaded", entry.name)
        self._on_change()

    def _give_up(self, entry: ModelEntry, reason: str) -> None:
        log.error("the files of %s cannot be used: %s", entry.name, reason)
        entry.fetch = None
        entry.retry_at = self._clock() + RETRY_SECONDS
