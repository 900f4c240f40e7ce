"""The model registry: requests for files from servers, retries, and unusable files."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest
from support.models.tokenizers import END, model_files

from modelswarm.checkpoint.tokenizer import MAX_SETTINGS_BYTES, MAX_TOKENIZER_BYTES
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
    MAX_MODELS,
    MAX_RETRY_SECONDS,
    RETRY_SECONDS,
    STALL_SECONDS,
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
READ_SECONDS = 60.0  # seconds; generous, as a thread reads files on a busy machine


class RegistryHarness:
    """A registry with a clock that tests move, and the answers of servers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sent: list[Send] = []
        self.changes = 0
        self.registry = ModelRegistry(
            self.sent.extend, lambda: self.now, lambda: 77.5, self._changed
        )

    def _changed(self) -> None:
        self.changes += 1

    def take_asked_peers(self) -> list[str]:
        """Return the peers asked since the last call; each is asked for all files at once."""
        peers = [send.to.peer for send in self.sent]
        names = [s.item.name for s in self.sent if isinstance(s.item, ModelFileRequest)]
        self.sent.clear()
        assert names == list(FILES) * (len(peers) // len(FILES))
        return peers[:: len(FILES)]

    def send_files(self, peer: str, files: dict[str, bytes], size: int = 1000) -> None:
        for name in FILES:
            content = files.get(name)
            if content is None:
                self.registry.on_file_chunk(peer, ModelFileChunk(name, 0, 0, b"", missing=True))
                continue
            for at in range(0, len(content), size):
                chunk = ModelFileChunk(name, at, len(content), content[at : at + size])
                self.registry.on_file_chunk(peer, chunk)

    async def wait_until_loaded(self, seconds: float = READ_SECONDS) -> bool:
        """Wait until no fetch runs, at most `seconds`; return True if a tokenizer was loaded."""
        await self.wait_until_idle(seconds)
        [entry] = self.registry.entries()
        return entry.tokenizer is not None

    async def wait_until_idle(self, seconds: float = READ_SECONDS) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            await asyncio.sleep(0.005)
            if all(entry.fetch is None for entry in self.registry.entries()):
                return


async def test_missing_tokenizer_has_the_reason_of_each_stage() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    [entry] = harness.registry.entries()
    reason = entry.describe_fetch()
    assert reason.startswith("its tokenizer waits for tokenizer.json, ")
    assert reason.endswith(" from s0")

    broken = {"tokenizer_config.json": b'{"a": 1,\n"b": }'}
    harness.send_files("s0/1/a", {**model_files(), **broken})
    await harness.wait_until_idle()
    cause = "tokenizer_config.json: not valid JSON: Expecting value: line 2 column 6 (char 14)"
    assert (entry.files_problem, entry.describe_fetch()) == (cause, "")

    harness.now = RETRY_SECONDS
    harness.registry.tick()
    assert entry.files_problem == cause, "it stays until the next outcome"
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    assert entry.files_problem == ""


async def test_late_files_are_the_reason_after_the_deadline() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.now = FETCH_SECONDS
    harness.registry.tick()

    [entry] = harness.registry.entries()
    assert entry.files_problem == "they did not arrive from s0 in 60 s"


async def test_files_are_requested_once_from_the_first_server() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.registry.on_peer_connected(replace(HELLO, peer="s1/1/b"))
    assert harness.take_asked_peers() == ["s0/1/a"]
    before = harness.changes
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    [entry] = harness.registry.entries()
    assert entry.tokenizer is not None
    assert (entry.revision, entry.known_since, entry.tokenizer.defaults.eos) == ("r1", 77, (END,))
    assert harness.changes > before
    harness.registry.on_peer_connected(replace(HELLO, peer="s2/1/c"))
    harness.now = 1000
    harness.registry.tick()
    assert harness.take_asked_peers() == []


async def test_next_server_is_asked_after_loss_or_timeout() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.registry.on_peer_connected(replace(HELLO, peer="s1/1/b"))
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.registry.on_file_chunk("s0/1/a", ModelFileChunk("tokenizer.json", 0, 5000, b"{"))
    harness.registry.on_peer_lost("s0/1/a")
    assert harness.take_asked_peers() == ["s1/1/b"]
    harness.registry.on_peer_connected(replace(HELLO, peer="s2/1/c"))
    harness.now = FETCH_SECONDS
    harness.registry.tick()
    assert harness.take_asked_peers() == ["s2/1/c"]
    harness.send_files("s1/1/b", model_files())
    assert not await harness.wait_until_loaded(1.0), (
        "late files of a server that timed out are ignored"
    )
    harness.send_files("s2/1/c", model_files())
    assert await harness.wait_until_loaded()


async def test_server_without_usable_files_lets_others_be_asked() -> None:
    harness = RegistryHarness()
    peers = ["s0/1/a", "s1/1/b", "s2/1/c"]
    for peer in peers:
        harness.registry.on_peer_connected(replace(HELLO, peer=peer))
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.registry.on_peer_lost("s0/1/a")
    assert harness.take_asked_peers() == ["s2/1/c"]
    harness.registry.on_peer_connected(replace(HELLO, peer="s0/2/d"))
    asked = []
    for _ in range(3):
        harness.now += STALL_SECONDS
        harness.registry.tick()
        asked += harness.take_asked_peers()
    assert sorted(asked) == ["s0/2/d", "s1/1/b", "s2/1/c"]
    for peer in asked[-1], asked[0]:  # the first one has a broken file
        files = {"tokenizer.json": b"{"} if peer == asked[-1] else model_files()
        harness.send_files(peer, files)
        await harness.wait_until_idle()
        harness.now += RETRY_SECONDS
        harness.registry.tick()
    [entry] = harness.registry.entries()
    assert entry.tokenizer is not None


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ModelFileChunk("tokenizer.json", 0, MAX_TOKENIZER_BYTES + 1, b"{"), None),
        (ModelFileChunk("config.json", 0, MAX_SETTINGS_BYTES + 1, b"{"), None),
        (ModelFileChunk("config.json", 0, 1, b"{}"), None),
        (
            ModelFileChunk("config.json", 0, 2, b"{"),
            ModelFileChunk("config.json", 1, 1000, b"}"),
        ),
    ],
    ids=["large tokenizer", "large file", "more than its size", "another size"],
)
async def test_file_of_a_wrong_size_is_rejected(
    first: ModelFileChunk, second: ModelFileChunk | None
) -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.registry.on_file_chunk("s0/1/a", first)
    [entry] = harness.registry.entries()
    if second is not None:
        assert entry.fetch is not None
        harness.registry.on_file_chunk("s0/1/a", second)
    assert entry.fetch is None
    assert entry.retry_at == RETRY_SECONDS


async def test_files_of_one_model_are_fetched_at_a_time() -> None:
    harness = RegistryHarness()
    for number in range(3):
        harness.registry.on_peer_connected(
            replace(HELLO, peer=f"s{number}/1/a", model=f"m{number}")
        )
    harness.registry.tick()
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.send_files("s0/1/a", model_files())
    await harness.wait_until_idle()
    harness.now = 1.0
    harness.registry.tick()
    assert harness.take_asked_peers() == ["s1/1/a"]


async def test_stalled_server_lets_every_other_model_go_first() -> None:
    harness = RegistryHarness()
    for number in range(3):
        harness.registry.on_peer_connected(
            replace(HELLO, peer=f"s{number}/1/a", model=f"m{number}")
        )
    asked = []
    for _ in range(4):
        harness.now += STALL_SECONDS
        harness.registry.tick()
        asked += harness.take_asked_peers()
    assert asked == ["s0/1/a", "s1/1/a", "s2/1/a", "s0/1/a", "s1/1/a"]


async def test_unusable_files_are_requested_again_after_a_pause() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.send_files("s0/1/a", {"config.json": b"{}"})
    assert not await harness.wait_until_loaded()
    harness.registry.tick()
    assert harness.take_asked_peers() == []
    harness.now = RETRY_SECONDS
    harness.registry.tick()
    assert harness.take_asked_peers() == ["s0/1/a"]
    harness.registry.on_file_chunk("s0/1/a", ModelFileChunk("tokenizer.json", 4, 10, b"gap"))
    harness.registry.on_file_chunk("s0/1/a", ModelFileChunk("../secret", 0, 1, b"x"))
    assert not await harness.wait_until_loaded(1.0)


async def test_pauses_grow_while_files_stay_unusable() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    pauses = []
    for _ in range(8):
        harness.send_files("s0/1/a", {"tokenizer.json": b"{"})
        await harness.wait_until_idle()
        [entry] = harness.registry.entries()
        assert entry.files_problem.startswith("tokenizer.json: ")
        pauses.append(entry.retry_at - harness.now)
        harness.now = entry.retry_at
        harness.registry.tick()
    assert pauses == [5, 10, 20, 40, 80, 160, MAX_RETRY_SECONDS, MAX_RETRY_SECONDS]
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    assert (entry.files_problem, entry.failures) == ("", 0)


async def test_template_that_does_not_compile_is_read_once() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.take_asked_peers()
    harness.send_files("s0/1/a", model_files(template="{% if %}"))
    assert await harness.wait_until_loaded()
    for _ in range(5):
        harness.now += 1000.0
        harness.registry.tick()
    assert harness.take_asked_peers() == []


async def test_new_revision_is_loaded_beside_the_old_one() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    harness.take_asked_peers()
    harness.registry.on_peer_connected(replace(HELLO, peer="n0/1/x", revision="r2"))
    assert harness.take_asked_peers() == ["n0/1/x"]
    harness.send_files("n0/1/x", model_files(generation={"eos_token_id": 9}))
    await harness.wait_until_idle()
    [entry] = harness.registry.entries()
    assert (entry.revision, set(entry.tokenizers())) == ("r1", {"r1", "r2"})
    harness.registry.on_peer_connected(replace(HELLO, peer="n1/1/y", revision="r3"))
    assert harness.take_asked_peers() == []  # one of another revision at a time
    harness.registry.on_peer_lost("n1/1/y")
    harness.registry.on_peer_lost("s0/1/a")
    harness.registry.tick()
    assert harness.take_asked_peers() == []
    assert entry.tokenizer is not None
    assert (entry.revision, entry.tokenizer.defaults.eos) == ("r2", (9, END))
    assert set(entry.tokenizers()) == {"r2"}


async def test_revision_that_leaves_again_gives_its_tokenizer_up() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.send_files("s0/1/a", model_files())
    assert await harness.wait_until_loaded()
    harness.registry.on_peer_connected(replace(HELLO, peer="n0/1/x", revision="r2"))
    harness.send_files("n0/1/x", model_files())
    await harness.wait_until_idle()
    [entry] = harness.registry.entries()
    assert set(entry.tokenizers()) == {"r1", "r2"}
    harness.registry.on_peer_lost("n0/1/x")
    harness.registry.tick()
    assert set(entry.tokenizers()) == {"r1"}


async def test_model_without_servers_stays_known() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.registry.on_peer_lost("s0/1/a")
    harness.registry.on_peer_lost("s0/1/a")
    [entry] = harness.registry.entries()
    assert (entry.name, entry.servers, entry.fetch) == ("m", {}, None)


def test_expected_model_is_known_until_its_last_pod_is_gone() -> None:
    harness = RegistryHarness()
    harness.registry.set_expected(frozenset({"m"}))
    [entry] = harness.registry.entries()
    assert (entry.name, entry.n_blocks, entry.tokenizer) == ("m", 0, None)
    assert harness.registry.is_settled(), "there is no server to ask"
    harness.registry.on_peer_connected(HELLO)
    assert not harness.registry.is_settled()
    assert harness.registry.entries() == [entry]
    harness.registry.set_expected(frozenset())
    harness.now += 2 * FORGET_SECONDS
    harness.registry.tick()
    assert harness.registry.entries() == [entry], "the model still has a server"
    harness.registry.on_peer_lost(HELLO.peer)
    harness.registry.tick()
    harness.now += FORGET_SECONDS * 0.9
    harness.registry.tick()
    assert harness.registry.entries() == [entry]
    harness.now += FORGET_SECONDS * 0.2
    harness.registry.tick()
    assert harness.registry.entries() == []


def test_model_expected_again_in_time_is_not_forgotten() -> None:
    harness = RegistryHarness()
    harness.registry.set_expected(frozenset({"m"}))
    for _ in range(4):
        harness.registry.set_expected(frozenset())
        harness.now += FORGET_SECONDS * 0.9
        harness.registry.tick()
        harness.registry.set_expected(frozenset({"m"}))
        harness.registry.tick()
    assert len(harness.registry.entries()) == 1


def test_models_are_kept_while_expectations_are_unknown() -> None:
    harness = RegistryHarness()
    harness.registry.on_peer_connected(HELLO)
    harness.registry.on_peer_lost(HELLO.peer)
    for _ in range(3):
        harness.now += 2 * FORGET_SECONDS
        harness.registry.set_expected(None)
        harness.registry.tick()
    assert len(harness.registry.entries()) == 1


def test_new_model_takes_the_place_of_one_without_pods() -> None:
    """Swarms that come and go filled all places for ten minutes, and a model without a place was never served."""
    harness = RegistryHarness()
    names = [f"m{number}" for number in range(MAX_MODELS)]
    harness.registry.set_expected(frozenset(names))
    harness.registry.set_expected(frozenset((*names, "more")))
    assert {each.name for each in harness.registry.entries()} == set(names), "all have pods"
    harness.registry.set_expected(frozenset((*names[1:], "new")))
    assert {each.name for each in harness.registry.entries()} == {*names[1:], "new"}


@pytest.mark.parametrize("are_pods_known", [False, True])
async def test_model_without_a_place_gets_the_next_one(are_pods_known: bool) -> None:
    """The servers stay connected, so no link names them to the registry again."""
    harness = RegistryHarness()
    names = [f"m{number}" for number in range(MAX_MODELS)]
    if are_pods_known:
        harness.registry.set_expected(frozenset(names))
    for name in names:
        harness.registry.on_peer_connected(replace(HELLO, peer=f"{name}/1/a", model=name))
    new = replace(HELLO, peer="new/1/b", model="new")
    for hello in (new, replace(new, peer="new/1/c")):
        harness.registry.on_peer_connected(hello)
    harness.registry.on_peer_lost("new/1/c")
    harness.registry.tick()
    assert {each.name for each in harness.registry.entries()} == set(names)

    harness.registry.on_peer_lost("m7/1/a")
    if are_pods_known:
        harness.registry.set_expected(frozenset((*names, "new")) - {"m7"})
    harness.registry.tick()
    assert {each.name for each in harness.registry.entries()} == {*names, "new"} - {"m7"}
    assert [set(each.servers) for each in harness.registry.entries() if each.name == "new"] == [
        {"new/1/b"}
    ]


@pytest.mark.parametrize("is_deleted", [False, True])
async def test_tokenizer_makes_room_once_its_model_is_deleted(is_deleted: bool) -> None:
    harness = RegistryHarness()
    harness.registry.set_expected(frozenset({"m", "n"}))
    harness.registry.on_peer_connected(HELLO)
    harness.send_files(HELLO.peer, model_files())
    await harness.wait_until_idle()
    old, new = sorted(harness.registry.entries(), key=lambda each: each.name)
    tokenizer = old.tokenizer
    assert tokenizer is not None
    harness.registry._memory = 3 * tokenizer.memory_bytes // 2

    harness.registry.on_peer_lost(HELLO.peer)
    harness.registry.set_expected(frozenset({"n"} if is_deleted else {"m", "n"}))
    harness.registry.on_peer_connected(replace(HELLO, peer="s1/1/b", model="n"))
    harness.send_files("s1/1/b", model_files())
    await harness.wait_until_idle()
    assert (new.tokenizer is not None) == is_deleted
    assert tokenizer.is_running == (not is_deleted)
    await harness.registry.close()


async def test_tokenizer_of_a_forgotten_model_is_ended() -> None:
    """A thread read its files while another model took its place: nothing knew its processes any more."""
    harness = RegistryHarness()
    names = [f"m{number}" for number in range(MAX_MODELS - 1)]
    harness.registry.set_expected(frozenset(names))
    harness.registry.on_peer_connected(HELLO)
    [entry] = [each for each in harness.registry.entries() if each.name == HELLO.model]
    harness.send_files(HELLO.peer, model_files())
    harness.registry.on_peer_lost(HELLO.peer)
    harness.registry.set_expected(frozenset((*names, "new")))
    assert entry not in harness.registry.entries()

    async with asyncio.timeout(READ_SECONDS):
        await asyncio.gather(*harness.registry._building)
    assert entry.tokenizer is None
