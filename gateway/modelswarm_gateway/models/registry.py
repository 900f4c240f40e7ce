"""Model registry: the models known to this gateway, their servers' Hellos, and their tokenizers.

The node reports links and file chunks. The registry requests files from servers and builds a tokenizer from them, once
per model and revision. A model stays known when its servers are lost, so that a client gets "no servers" and not
"no such model". Where pods define the models, a model is forgotten some time after its last pod. Knows no sessions.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from modelswarm.checkpoint.generation_config import ignored_sentence
from modelswarm.checkpoint.tokenizer import MAX_SETTINGS_BYTES, MAX_TOKENIZER_BYTES
from modelswarm.process.memory_limit import read_memory_limit
from modelswarm.process.start_progress import StartPhase
from modelswarm.protocol.identity import PeerId, name_of
from modelswarm.protocol.messages import Hello, Lane, ModelFileChunk, ModelFileRequest, Send
from modelswarm.protocol.messages import reply_address as reply
from modelswarm.protocol.wire.codec import printable
from modelswarm_gateway.models.encode_pool import MAX_LARGE_REQUESTS
from modelswarm_gateway.models.model_process import ModelProcessError
from modelswarm_gateway.models.tokenizer import (
    OPTIONAL_FILES,
    REQUIRED_FILES,
    ModelFilesError,
    ModelTokenizer,
)

log = logging.getLogger(__name__)

FILES = (*REQUIRED_FILES, *OPTIONAL_FILES)
# Time for all files of a model, in seconds; then another server is asked.
FETCH_SECONDS = 60.0
# Time without a chunk after which another model's files are requested, in seconds.
STALL_SECONDS = 10.0
# Pause after files that cannot be used, in seconds; doubled each time up to the limit.
RETRY_SECONDS = 5.0
MAX_RETRY_SECONDS = 300.0
# Time after which a model without servers and pods is forgotten, in seconds.
FORGET_SECONDS = 600.0
MAX_MODELS = 256


@dataclass(slots=True)
class _Fetch:
    """A transfer of a model's files from one server."""

    peer: PeerId
    revision: str
    deadline: float
    stalls_at: float
    sizes: dict[str, int] = field(default_factory=dict)  # bytes, as its first chunk said
    parts: dict[str, bytearray] = field(default_factory=dict)
    done: dict[str, bytes | None] = field(default_factory=dict)  # None: the model has no such file

    @property
    def is_complete(self) -> bool:
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
    revision: str = ""  # of `tokenizer`
    tokenizer: ModelTokenizer | None = None
    # Of a revision that turns do not run on yet. It is loaded before they do, so that no request waits for it.
    ahead_revision: str = ""
    ahead: ModelTokenizer | None = None
    servers: dict[PeerId, Hello] = field(default_factory=dict)  # the last one is asked for files
    adapters: frozenset[str] = frozenset()  # names; of the last servers if it has none now
    fetch: _Fetch | None = None
    retry_at: float = 0.0
    asked_at: float = float("-inf")  # time of the last request for its files
    failures: int = 0  # times in a row that its files could not be used
    unused_since: float | None = None  # time since which it has neither servers nor pods
    phase: StartPhase = StartPhase.TOKENIZER  # what is made of its files
    files_problem: str = ""  # why its files cannot be used

    def note_adapters(self) -> None:
        """Take the adapters of the present servers. Those of lost servers stay known, as the model does."""
        if self.servers:
            hellos = self.servers.values()
            self.adapters = frozenset(each.name for hello in hellos for each in hello.adapters)

    def end_failed_fetch(self) -> None:
        """End the transfer, and ask all other servers before this one again: only its own files may be broken."""
        hello = self.servers.pop(self.fetch.peer, None) if self.fetch else None
        if hello is not None:
            self.servers = {hello.peer: hello, **self.servers}
        self.fetch = None

    def describe_fetch(self) -> str:
        """Return what the tokenizer waits for; empty if no transfer is in progress."""
        if self.fetch is None:
            return ""
        peer, missing = name_of(self.fetch.peer), [f for f in FILES if f not in self.fetch.done]
        if missing:
            return f"its tokenizer waits for {', '.join(missing)} from {peer}"
        return f"its {self.phase} is being read"

    def tokenizers(self) -> dict[str, ModelTokenizer]:
        """Return those that are loaded, by their revisions."""
        found = ((self.revision, self.tokenizer), (self.ahead_revision, self.ahead))
        return {revision: each for revision, each in found if each is not None}

    def server_to_ask(self, active_revision: str | None) -> Hello | None:
        """Return the server to request files from: of the revision that turns run on, or of another one.

        None if the tokenizers of both are loaded.
        """
        hellos = list(self.servers.values())
        usable = [hello for hello in hellos if hello.revision == active_revision] or hellos
        loaded = self.tokenizers()
        if usable and not any(hello.revision in loaded for hello in usable):
            return usable[-1]
        if self.ahead is not None:
            return None  # one at a time: each takes memory
        return next((hello for hello in reversed(hellos) if hello.revision not in loaded), None)


class ModelRegistry:
    def __init__(
        self,
        send: Callable[[list[Send]], None],
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_change: Callable[[], None],
        active_revision: Callable[[str], str | None] = lambda model: None,
    ) -> None:
        """`on_change` is called at each change of an entry. `active_revision` returns the one that turns run on."""
        self._active_revision = active_revision
        self._send, self._clock, self._wall, self._on_change = send, clock, wall, on_change
        self._entries: dict[str, ModelEntry] = {}
        self._without_place: dict[PeerId, Hello] = {}  # servers of models that found no place
        self._expected: frozenset[str] | None = None
        self._building: set[asyncio.Task[None]] = set()
        self._places = asyncio.Semaphore(MAX_LARGE_REQUESTS)  # shared by all models
        self._memory = tokenizer_memory()

    def entries(self) -> list[ModelEntry]:
        return list(self._entries.values())

    def is_settled(self) -> bool:
        """Return True when the tokenizer of each model with servers is loaded, or its files cannot be used."""
        return all(
            e.tokenizer is not None or e.retry_at > 0 for e in self._entries.values() if e.servers
        )

    def set_expected(self, models: frozenset[str] | None) -> None:
        """Set the models that have or will have servers; None: not known."""
        if models == self._expected:
            return
        self._expected = models
        for name in models or ():
            self._add_entry(name, name)
        self._on_change()

    def _add_entry(self, name: str, who: str) -> ModelEntry | None:
        entry = self._entries.get(name)
        if entry is None:
            if not self._has_place():
                log.warning(
                    "ignored model %s of %s: %d models are known already", name, who, MAX_MODELS
                )
                return None
            if len(self._entries) >= MAX_MODELS:
                unused = next(filter(self._is_unused, self._entries.values()))
                self._forget(unused, "another one needs its place")
            entry = self._entries[name] = ModelEntry(name, 0, int(self._wall()))
        return entry

    def _has_place(self) -> bool:
        """Return whether a new model can be known, perhaps in the place of an unused one."""
        return len(self._entries) < MAX_MODELS or any(map(self._is_unused, self._entries.values()))

    def on_peer_connected(self, hello: Hello) -> None:
        entry = self._add_entry(hello.model, hello.peer)
        if entry is None:
            self._without_place[hello.peer] = hello
            return
        entry.n_blocks = hello.n_blocks
        entry.servers[hello.peer] = hello
        entry.note_adapters()
        entry.retry_at = 0.0
        self._request_files(entry)
        self._on_change()

    def on_peer_lost(self, peer: PeerId) -> None:
        self._without_place.pop(peer, None)
        for entry in self._entries.values():
            if entry.servers.pop(peer, None) is not None:
                entry.note_adapters()
                if entry.fetch is not None and entry.fetch.peer == peer:
                    entry.fetch = None
                self._request_files(entry)
                self._on_change()

    def _settle(self, entry: ModelEntry) -> None:
        """Let the tokenizer of the active revision be the first, and end one that no server needs any more."""
        connected = {hello.revision for hello in entry.servers.values()}
        active = self._active_revision(entry.name)
        if entry.ahead is None:
            return
        is_next = active == entry.ahead_revision or entry.revision not in connected
        if entry.ahead_revision in connected and (is_next or entry.tokenizer is None):
            before = entry.revision, entry.tokenizer
            entry.revision, entry.tokenizer = entry.ahead_revision, entry.ahead
            entry.ahead_revision, entry.ahead = before  # turns may come back to it
            self._on_change()
        if entry.ahead_revision not in connected:
            self._end_ahead(entry)
            self._on_change()

    def tick(self) -> None:
        """End late transfers, request files where they are due, and give places of unused models to new ones."""
        now = self._clock()
        self._forget_unused(now)
        for hello in list(self._without_place.values()):
            if hello.model in self._entries or self._has_place():
                del self._without_place[hello.peer]
                self.on_peer_connected(hello)
        for entry in self._entries.values():
            self._settle(entry)
            fetch = entry.fetch
            if fetch is not None and (
                now >= fetch.deadline or (now >= fetch.stalls_at and not fetch.is_complete)
            ):
                late, seconds = fetch.peer, now - entry.asked_at
                log.warning("files of %s did not arrive from %s in %g s", entry.name, late, seconds)
                entry.end_failed_fetch()
                entry.files_problem = f"they did not arrive from {name_of(late)} in {seconds:g} s"
                self._on_change()
            if entry.tokenizer is not None and not entry.tokenizer.is_running:
                log.warning(
                    "the processes of the tokenizer of %s ended; it is loaded again", entry.name
                )
                self._end_tokenizer(entry)
                self._on_change()
            if entry.ahead is not None and not entry.ahead.is_running:
                self._end_ahead(entry)
                self._on_change()
        # The one that was asked longest ago is next: a server that sends nothing delays others once.
        for entry in sorted(self._entries.values(), key=lambda entry: entry.asked_at):
            self._request_files(entry)

    def _forget_unused(self, now: float) -> None:
        if self._expected is None:
            return
        for entry in list(self._entries.values()):
            if not self._is_unused(entry):
                entry.unused_since = None
            elif entry.unused_since is None:
                entry.unused_since = now
            elif now - entry.unused_since > FORGET_SECONDS:
                self._forget(entry, f"no server or pod for {FORGET_SECONDS:g} s")

    def _is_unused(self, entry: ModelEntry) -> bool:
        """Return whether it has neither servers nor pods."""
        return not entry.servers and entry.name not in (self._expected or ())

    def _forget(self, entry: ModelEntry, reason: str) -> None:
        log.info("forgot model %s: %s", entry.name, reason)
        self._end_tokenizer(entry)
        self._end_ahead(entry)
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
        for entry in self._entries.values():
            self._end_tokenizer(entry)
            self._end_ahead(entry)

    def _request_files(self, entry: ModelEntry) -> None:
        now = self._clock()
        hello = entry.server_to_ask(self._active_revision(entry.name))
        is_fetching = any(other.fetch is not None for other in self._entries.values())
        if is_fetching or hello is None or now < entry.retry_at:
            return  # one model at a time: the files of many would fill the memory
        peer, entry.asked_at = hello.peer, now
        entry.fetch = _Fetch(peer, hello.revision, now + FETCH_SECONDS, now + STALL_SECONDS)
        self._enter_phase(entry, StartPhase.TOKENIZER)
        requests = [Send(reply(peer), Lane.LIVE, ModelFileRequest(name)) for name in FILES]
        self._send(requests)

    def _store_chunk(self, entry: ModelEntry, fetch: _Fetch, chunk: ModelFileChunk) -> None:
        if chunk.name not in FILES or chunk.name in fetch.done:
            return
        if chunk.missing:
            fetch.done[chunk.name] = None
        else:
            part = fetch.parts.setdefault(chunk.name, bytearray())
            size = fetch.sizes.setdefault(chunk.name, chunk.total)
            if fault := _chunk_fault(chunk, len(part), size):
                self._reject_files(entry, f"{chunk.name}: {fault}")
                return
            part += chunk.data
            fetch.stalls_at = self._clock() + STALL_SECONDS
            if len(part) >= size:
                fetch.done[chunk.name] = bytes(part)
                del fetch.parts[chunk.name]
        self._on_change()
        if fetch.is_complete:
            task = asyncio.get_running_loop().create_task(self._build_tokenizer(entry, fetch))
            self._building.add(task)
            task.add_done_callback(self._building.discard)

    async def _build_tokenizer(self, entry: ModelEntry, fetch: _Fetch) -> None:
        loop = asyncio.get_running_loop()

        def enter_phase(phase: StartPhase) -> None:  # on the thread that reads the files
            loop.call_soon_threadsafe(self._enter_phase, entry, phase)

        try:
            tokenizer = await asyncio.to_thread(
                ModelTokenizer, fetch.files, self._places, enter_phase, name=entry.name
            )
        except (ModelFilesError, ModelProcessError) as error:
            if entry.fetch is fetch:
                self._reject_files(entry, str(error))
            return
        except Exception as error:  # libraries raise many kinds of errors for broken files
            log.exception("cannot read the files of %s", entry.name)
            if entry.fetch is fetch:
                self._reject_files(entry, f"{type(error).__name__}: {error}")
            return
        if problem := self._make_room(entry, tokenizer):
            tokenizer.close()
            if entry.fetch is fetch:
                self._reject_files(entry, problem)
            return
        is_ahead = entry.tokenizer is not None and fetch.revision != self._active_revision(
            entry.name
        )
        if is_ahead and self._is_needed(entry):
            self._end_ahead(entry)
            entry.ahead, entry.ahead_revision = tokenizer, fetch.revision
        else:
            self._end_tokenizer(entry)
            entry.tokenizer, entry.revision = tokenizer, fetch.revision
        entry.failures, entry.files_problem = 0, ""
        if entry.fetch is fetch:
            entry.fetch = None
        log.info("loaded the tokenizer of %s", entry.name)
        if tokenizer.chat_fault:
            log.warning("chats with %s are refused: %s", entry.name, tokenizer.chat_fault)
        if ignored := tokenizer.defaults.ignored:
            log.warning("the model %s: %s", entry.name, ignored_sentence(ignored))
        self._on_change()

    def _make_room(self, entry: ModelEntry, tokenizer: ModelTokenizer) -> str:
        """Return why there is no room for the tokenizer of this entry, even without those of unused models."""
        if self._entries.get(entry.name) is not entry:
            return "the model was forgotten meanwhile"
        if self._memory_problem(entry, tokenizer):
            for other in self._entries.values():
                if self._is_unused(other):  # it is loaded again with its next server
                    self._end_tokenizer(other)
                    self._end_ahead(other)
        return self._memory_problem(entry, tokenizer)

    def _memory_problem(self, entry: ModelEntry, tokenizer: ModelTokenizer) -> str:
        """Return why there is no memory for the tokenizer of this entry; empty if there is."""
        others = [
            each
            for e in self._entries.values()
            for each in (e.tokenizer, e.ahead)
            if each is not None and (e is not entry or self._is_needed(entry))
        ]
        used = sum(other.memory_bytes for other in others)
        if used + tokenizer.memory_bytes <= self._memory:
            return ""
        needed, free = tokenizer.memory_bytes >> 20, max(0, self._memory - used) >> 20
        return (
            f"tokenizer.json: the tokenizer needs {needed} MiB of memory, and {free} of the {self._memory >> 20} MiB "
            "for the tokenizers of all models are free; the gateway's memory limit is twice as much"
        )

    def _end_tokenizer(self, entry: ModelEntry) -> None:
        if entry.tokenizer is not None:
            entry.tokenizer.close()
            entry.tokenizer = None

    def _end_ahead(self, entry: ModelEntry) -> None:
        if entry.ahead is not None:
            entry.ahead.close()
            entry.ahead, entry.ahead_revision = None, ""

    def _is_needed(self, entry: ModelEntry) -> bool:
        """Return whether the present tokenizer of an entry stays when another one is loaded."""
        return entry.revision in {hello.revision for hello in entry.servers.values()}

    def _enter_phase(self, entry: ModelEntry, phase: StartPhase) -> None:
        entry.phase = phase
        self._on_change()

    def _reject_files(self, entry: ModelEntry, reason: str) -> None:
        reason = printable(reason)  # it may repeat words of the files
        pause = min(MAX_RETRY_SECONDS, RETRY_SECONDS * 2.0 ** min(entry.failures, 10))
        log.error("cannot use the files of %s, retry in %g s: %s", entry.name, pause, reason)
        entry.failures, entry.files_problem = entry.failures + 1, reason
        entry.end_failed_fetch()
        entry.retry_at = self._clock() + pause
        self._on_change()


def tokenizer_memory() -> int:
    """Return the bytes that the tokenizers of all models may need: half of the container's memory, or the machine's."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(read_memory_limit() or machine, machine) // 2


def _chunk_fault(chunk: ModelFileChunk, received: int, size: int) -> str:
    """Return why the chunk cannot be used; empty if it can. `size`: bytes of the file, as its first chunk said."""
    most = MAX_TOKENIZER_BYTES if chunk.name in REQUIRED_FILES else MAX_SETTINGS_BYTES
    if size > most:
        return f"{size} bytes are more than {most}"
    if chunk.total != size:
        return f"its size changed from {size} to {chunk.total} bytes"
    if chunk.offset != received or received + len(chunk.data) > size:
        return f"a chunk at {chunk.offset} does not follow {received} bytes of {size}"
    return ""
