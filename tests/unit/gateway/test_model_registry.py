"""How the gateway gets the files of a model: from whom, how often, and what happens when they do not come."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from support.models.tokenizers import END, model_files

from modelswarm.protocol.messages import (
    PROTOCOL_VERSION,
    Hello,
    Lane,
    ModelFileChunk,
    ModelFileRequest,
    Role,
    Send,
)
from modelswarm_gateway.models.registry import (
    FETCH_SECONDS,
    FILES,
    FORGET_SECONDS,
    RETRY_SECONDS,
    ModelRegistry,
)

HELLO = Hello(
    PROTOCOL_VERSION,
    "s0/1/a",
    Role.SERVER,
    link="",
    lane=Lane.LIVE,
    model="m",
    revision="r1",
    last=2,
    n_blocks=2,
)
READ_SECONDS = 30.0  # for a thread to read files, on a busy machine


class Shelf:
    """A library, a clock moved by hand, and a way to play the servers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[Send] = []
        self.changes = 0
        self.library = ModelRegistry(
            self.sent.extend, lambda: self.now, lambda: 77.5, self._changed
        )

    def _changed(self) -> None:
        self.changes += 1

    def asked(self) -> list[str]:
        """Who was asked since the last call; all files are asked for at once."""
        peers = [send.to.peer for send in self.sent]
        names = [s.item.name for s in self.sent if isinstance(s.item, ModelFileRequest)]
        self.sent.clear()
        assert names == list(FILES) * (len(peers) // len(FILES))
        return peers[:: len(FILES)]

    def answer(self, peer: str, files: dict[str, bytes], size: int = 1000) -> None:
        for name in FILES:
            content = files.get(name)
            if content is None:
                self.library.on_file_chunk(peer, ModelFileChunk(name, 0, 0, b"", missing=True))
                continue
            for at in range(0, len(content), size):
                chunk = ModelFileChunk(name, at, len(content), content[at : at + size])
                self.library.on_file_chunk(peer, chunk)

    async def loaded(self, seconds: float = READ_SECONDS) -> bool:
        """Whether there are files that can be used, once none are waited for, or after so many seconds."""
        await self.library_quiet(seconds)
        [entry] = self.library.entries()
        return entry.tokenizer is not None

    async def library_quiet(self, seconds: float = READ_SECONDS) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(0.005)
            if all(entry.fetch is None for entry in self.library.entries()):
                return


async def test_files_are_requested_once_from_the_first_server() -> None:
    shelf = Shelf()
    shelf.library.on_peer_connected(HELLO)
    shelf.library.on_peer_connected(replace(HELLO, peer="s1/1/b"))
    assert shelf.asked() == ["s0/1/a"]
    before = shelf.changes
    shelf.answer("s0/1/a", model_files())
    assert await shelf.loaded()
    [entry] = shelf.library.entries()
    assert entry.tokenizer is not None
    assert (entry.revision, entry.known_since, entry.tokenizer.defaults.eos) == ("r1", 77, (END,))
    assert shelf.changes > before
    shelf.library.on_peer_connected(replace(HELLO, peer="s2/1/c"))
    shelf.now = 1000
    shelf.library.tick()
    assert shelf.asked() == []


async def test_next_server_is_asked_after_loss_or_timeout() -> None:
    shelf = Shelf()
    shelf.library.on_peer_connected(HELLO)
    shelf.library.on_peer_connected(replace(HELLO, peer="s1/1/b"))
    assert shelf.asked() == ["s0/1/a"]
    shelf.library.on_file_chunk("s0/1/a", ModelFileChunk("tokenizer.json", 0, 5000, b"{"))
    shelf.library.on_peer_lost("s0/1/a")
    assert shelf.asked() == ["s1/1/b"]
    shelf.library.on_peer_connected(replace(HELLO, peer="s2/1/c"))
    shelf.now = FETCH_SECONDS
    shelf.library.tick()
    assert shelf.asked() == ["s2/1/c"]
    shelf.answer("s1/1/b", model_files())
    assert not await shelf.loaded(1.0), "late files of a server that was given up"
    shelf.answer("s2/1/c", model_files())
    assert await shelf.loaded()


async def test_unusable_files_are_requested_again_after_a_pause() -> None:
    shelf = Shelf()
    shelf.library.on_peer_connected(HELLO)
    assert shelf.asked() == ["s0/1/a"]
    shelf.answer("s0/1/a", {"config.json": b"{}"})
    assert not await shelf.loaded()
    shelf.library.tick()
    assert shelf.asked() == []
    shelf.now = RETRY_SECONDS
    shelf.library.tick()
    assert shelf.asked() == ["s0/1/a"]
    shelf.library.on_file_chunk("s0/1/a", ModelFileChunk("tokenizer.json", 4, 10, b"gap"))
    shelf.library.on_file_chunk("s0/1/a", ModelFileChunk("../secret", 0, 1, b"x"))
    assert not await shelf.loaded(1.0)


async def test_new_revision_is_loaded_once_the_old_has_no_server() -> None:
    shelf = Shelf()
    shelf.library.on_peer_connected(HELLO)
    shelf.answer("s0/1/a", model_files())
    assert await shelf.loaded()
    shelf.asked()
    shelf.library.on_peer_connected(replace(HELLO, peer="n0/1/x", revision="r2"))
    assert shelf.asked() == []
    shelf.library.on_peer_lost("s0/1/a")
    assert shelf.asked() == ["n0/1/x"]
    shelf.answer("n0/1/x", model_files(generation={"eos_token_id": 9}))
    await shelf.library_quiet()
    [entry] = shelf.library.entries()
    assert entry.tokenizer is not None
    assert (entry.revision, entry.tokenizer.defaults.eos) == ("r2", (9, END))


async def test_model_without_servers_stays_known() -> None:
    shelf = Shelf()
    shelf.library.on_peer_connected(HELLO)
    shelf.library.on_peer_lost("s0/1/a")
    shelf.library.on_peer_lost("s0/1/a")
    [entry] = shelf.library.entries()
    assert (entry.name, entry.servers, entry.fetch) == ("m", {}, None)


def test_expected_model_is_known_until_its_last_pod_is_gone() -> None:
    shelf = Shelf()
    shelf.library.set_expected(frozenset({"m"}))
    [entry] = shelf.library.entries()
    assert (entry.name, entry.n_blocks, entry.tokenizer) == ("m", 0, None)
    assert shelf.library.is_settled(), "nobody can be asked yet"
    shelf.library.on_peer_connected(HELLO)
    assert not shelf.library.is_settled()
    assert shelf.library.entries() == [entry]
    shelf.library.set_expected(frozenset())
    shelf.now += 2 * FORGET_SECONDS
    shelf.library.tick()
    assert shelf.library.entries() == [entry], "it still has a server"
    shelf.library.on_peer_lost(HELLO.peer)
    shelf.library.tick()
    shelf.now += FORGET_SECONDS * 0.9
    shelf.library.tick()
    assert shelf.library.entries() == [entry]
    shelf.now += FORGET_SECONDS * 0.2
    shelf.library.tick()
    assert shelf.library.entries() == []


def test_model_expected_again_in_time_is_not_forgotten() -> None:
    shelf = Shelf()
    shelf.library.set_expected(frozenset({"m"}))
    for _ in range(4):
        shelf.library.set_expected(frozenset())
        shelf.now += FORGET_SECONDS * 0.9
        shelf.library.tick()
        shelf.library.set_expected(frozenset({"m"}))
        shelf.library.tick()
    assert len(shelf.library.entries()) == 1


def test_models_are_kept_while_expectations_are_unknown() -> None:
    shelf = Shelf()
    shelf.library.on_peer_connected(HELLO)
    shelf.library.on_peer_lost(HELLO.peer)
    for _ in range(3):
        shelf.now += 2 * FORGET_SECONDS
        shelf.library.set_expected(None)
        shelf.library.tick()
    assert len(shelf.library.entries()) == 1
